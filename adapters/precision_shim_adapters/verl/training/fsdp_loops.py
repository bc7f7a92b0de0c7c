"""Scale the fp16 loss in verl's FSDP loops up to 0.7.1, and report skipped steps."""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, Symbol, seam

from ... import torch_fp16
from .fsdp import (
    ACTOR,
    CRITIC,
    ON_ENGINE,
    ON_LEGACY,
    SHARDED,
    keep_at_optimizer,
    no_legacy_workers,
    optimizer_of,
    training_of,
)


def native_loop(symbol: Symbol, settings: Any) -> str | None:
    """Return a reason to skip the seam if verl's loop itself scales the loss (since 0.8)."""
    return "verl scales the loss in its own loop" if "scaler" in symbol.names else None


@seam(
    f"{SHARDED}.forward_backward_batch",
    why="0.7.1's loop knows no scaler: its loss comes from this argument",
    delete_when="verl >= 0.8 is the oldest in use",
    relies_on=("backward",),
    native=native_loop,
    **ON_ENGINE,
)
def scale_engine_loss(call: Call, loss_function: Any, forward_only: Any) -> Any:
    """Scale the loss of each micro-batch of 0.7.1's engine."""
    training = training_of(call.instance)
    if training is not None and loss_function is not None and not forward_only:
        call.arguments["loss_function"] = training.scaled(loss_function)
    return call.proceed()


@seam(
    f"{ACTOR}.update_policy",
    why="its dict of metrics",
    relies_on=("scaler", "actor_optimizer"),
    **ON_LEGACY,
)
def update_policy(call: Call) -> Any:
    """Add the scaler's metrics to the result of an update of 0.7.1's actor."""
    keep_at_optimizer(call.instance)  # the actor may have been made before install()
    result = call.proceed()
    training = training_of(call.instance)
    result.update(training.metrics("actor/") if training is not None else {})
    return result


@seam(
    f"{CRITIC}.update_critic",
    why="tells whose loss is being made; its dict of metrics",
    relies_on=("compute_value_loss", "backward", "_optimizer_step"),
    **ON_LEGACY,
)
def update_critic(call: Call) -> Any:
    """In a critic's update, let ``scale_value_loss`` scale the loss; add the scaler's metrics."""
    training = training_of(call.instance)
    if training is None or not training.drives:
        return call.proceed()
    with training.in_progress():
        result = call.proceed()
    result.update(training.metrics("critic/"))
    return result


@seam(
    "verl.trainer.ppo.core_algos:compute_value_loss",
    why="the loss of the legacy critic, before its backward",
    native=no_legacy_workers,
    **ON_LEGACY,
)
def scale_value_loss(call: Call) -> Any:
    """Scale the loss of 0.7.1's critic."""
    result = call.proceed()
    training = torch_fp16.ScaledTraining.current()
    if training is not None:
        training.attach(result[0])
    return result


@seam(
    f"{SHARDED}.optimizer_step",
    why="a skipped step has grad norm NaN; around 0.7.1's, which unscales nothing, the rest of the "
    "scaler's work",
    delete_when="verl reports skipped steps",
    relies_on=("optimizer", "isfinite"),
    **ON_ENGINE,
)
@seam(
    f"{ACTOR}._optimizer_step",
    why="a skipped step has grad norm NaN",
    relies_on=("scaler", "actor_optimizer"),
    **ON_LEGACY,
)
@seam(
    f"{CRITIC}._optimizer_step",
    why="unscale before its clipping, update after its step",
    relies_on=("critic_optimizer", "isfinite"),
    **ON_LEGACY,
)
def step(call: Call) -> Any:
    """Return NaN as a skipped step's grad norm; unscale and step if verl has no scaler.

    For a skipped step verl itself returns the gradients' norm, which may be inf or NaN.
    """
    training = training_of(call.instance)
    if training is None:
        return call.proceed()
    with training.one_step(optimizer_of(call.instance)):
        norm = call.proceed()
    return training.norm(norm)
