"""Scale the fp16 loss in the loops of verl's engines and legacy workers, and report skipped steps.

All of verl's engines but Megatron's shard with FSDP. VeOmni, Automodel and torchtitan engines, and
the FSDP engine of 0.7.1, neither scale the loss nor unscale the gradients, and skip a step whose
grad norm is not finite. FSDP Turbo runs the FSDP engine's loop.
"""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, Symbol, seam

from ... import torch_fp16
from ..config import ACTOR, AUTOMODEL, CRITIC, SHARDED, TITAN, TURBO, VEOMNI, subject_of
from . import fsdp
from .engines import on
from .fsdp import inside, training_of


def native_loop(symbol: Symbol, settings: Any) -> str | None:
    """Return a reason to skip the seam if verl's loop itself scales the loss (since 0.8)."""
    return "verl scales the loss in its own loop" if "scaler" in symbol.names else None


@seam(
    f"{SHARDED}.forward_backward_batch",
    why="0.7.1's loop knows no scaler: its loss comes from this argument",
    delete_when="verl >= 0.8 is the oldest in use",
    relies_on=("backward",),
    native=native_loop,
    **fsdp.ON_ENGINE,
)
@seam(
    at=[
        {"target": f"{engine}.forward_backward_batch", **on(engine)}
        for engine in (VEOMNI, AUTOMODEL, TITAN)
    ],
    why="the loss comes from this argument, and its backward pass runs within",
    relies_on=("backward",),
)
def scale_loss(call: Call, loss_function: Any, forward_only: Any) -> Any:
    """Scale the loss of each micro-batch, and its MoE auxiliary losses."""
    training = training_of(call.instance)
    if training is None or not training.drives or loss_function is None or forward_only:
        return call.proceed()
    from ...torch_fp16.auxiliary import auxiliary_losses

    with auxiliary_losses(training) as follow:
        call.arguments["loss_function"] = training.scaled(loss_function, follow)
        return call.proceed()


@seam(
    f"{ACTOR}.update_policy",
    why="its dict of metrics",
    relies_on=("scaler", "actor_optimizer"),
    **fsdp.ON_LEGACY,
)
@seam(
    f"{CRITIC}.update_critic",
    why="tells whose loss is being made; its dict of metrics",
    relies_on=("compute_value_loss", "backward", "_optimizer_step"),
    **fsdp.ON_LEGACY,
)
def update(call: Call) -> Any:
    """Let ``scale_value_loss`` scale a critic's loss; add the scaler's metrics."""
    fsdp.keep_at_optimizer(call.instance)  # the actor may have been made before install()
    training = training_of(call.instance)
    if training is None:
        return call.proceed()
    with training.in_progress():
        result = call.proceed()
    result.update(training.metrics(f"{subject_of(call.instance)}/"))
    return result


@seam(
    "verl.trainer.ppo.core_algos:compute_value_loss",
    why="the loss of the legacy critic, before its backward",
    **fsdp.WITH_LEGACY,
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
    **fsdp.ON_ENGINE,
)
@seam(
    f"{ACTOR}._optimizer_step",
    why="a skipped step has grad norm NaN",
    relies_on=("scaler", "actor_optimizer"),
    **fsdp.ON_LEGACY,
)
@seam(
    f"{CRITIC}._optimizer_step",
    why="unscale before its clipping, update after its step",
    relies_on=("critic_optimizer", "isfinite"),
    **fsdp.ON_LEGACY,
)
@seam(
    at=[
        {"target": f"{engine}.optimizer_step", **on(engine)}
        for engine in (VEOMNI, AUTOMODEL, TITAN, TURBO)
    ],
    why="clips, looks whether the norm is finite, and steps",
    relies_on=("isfinite", "optimizer"),
)
def step(call: Call) -> Any:
    """Return NaN as a skipped step's grad norm; unscale and step if verl has no scaler.

    For a skipped step verl itself returns the gradients' norm, which may be inf or NaN.
    """
    training = training_of(call.instance)
    if training is None:
        return call.proceed()
    optimizer = fsdp.optimizer_of(call.instance)
    with training.one_step(optimizer, inside(optimizer)):
        norm = call.proceed()
    return training.norm(norm)
