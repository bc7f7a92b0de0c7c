"""Loss scaling for the RL trainer in float16, the Monarch actor ``PolicyTrainer``.

The shim replaces ``optim_step`` by an endpoint that unscales the gradients, which the trainer
computes elsewhere, and scales losses only of trainers with this endpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from precision_shim.adapting import Call, in_force, seam

from ...torch_fp16 import FEATURE, ScaledTraining
from ..config import computes_in_float16
from .endpoints import UNSCALES, remake
from .loss_scaling import leave, make, ready, scale_innermost, tell_unscaled
from .trainers import FRAMEWORK, ON_RL, POLICY, RL, SCALED

_NORM = "trainer/grad_norm/mean"


@seam(
    f"{POLICY}._build_model",
    why="the loss function exists, and the checkpoint is loaded later, within __init__",
    relies_on=("loss_fn", "set_lm_head", "checkpointer", "optimizers", "model_parts", "device"),
    optional=True,
    **SCALED,
    **ON_RL,
)
def build(call: Call, config: Any) -> Any:
    """Build the model; if it computes in float16, make a scaler and scale the loss."""
    model = call.proceed()
    trainer = call.instance
    if not computes_in_float16(config.training):
        return model
    own = _own_endpoints(trainer)
    if own:
        leave(type(trainer).__name__, own, "leave these to PolicyTrainer")
        return model
    training = make(trainer, "policy")

    def attach(loss: torch.Tensor) -> None:
        if in_force(FRAMEWORK, FEATURE, RL):
            training.attach(loss)

    scale_innermost(trainer, attach)
    return model


def _own_endpoints(trainer: Any) -> list[str]:
    """The endpoints in which a subclass computes gradients or steps in its own way."""
    own = [] if hasattr(type(trainer).optim_step, UNSCALES) else ["optim_step"]
    return own + _list_overridden(trainer, "forward_backward")


def _list_overridden(trainer: Any, name: str) -> list[str]:
    from torchtitan.experiments.rl.actors.trainer import PolicyTrainer

    kinds = (type(trainer), PolicyTrainer)
    held, theirs = (inspect.getattr_static(kind, name) for kind in kinds)
    return [] if held is theirs else [name]


@seam(f"{POLICY}.__init__", why="the optimizers exist", optional=True, **SCALED, **ON_RL)
def build_trainer(call: Call, config: Any) -> None:
    """Build a trainer; then store its loss-scaling object, if it has one, on its optimizers."""
    tell_unscaled(config.training, "trainer.training")
    call.proceed()
    trainer = call.instance
    training = ScaledTraining.of(trainer)
    if training is not None:
        ready(training, trainer, "optim_step._method")
    elif computes_in_float16(config.training) and not _own_endpoints(trainer):
        own = _list_overridden(trainer, "_build_model")
        if own:
            leave(type(trainer).__name__, own, "call PolicyTrainer's in it")


@seam(
    f"{POLICY}.optim_step",
    why="clips, steps and reports",
    relies_on=(
        *("clip_grad_norm_", "optimizers", "lr_schedulers", "zero_grad"),
        *("policy_version", "OptimStepOutput", "concurrent_endpoint", _NORM),
    ),
    optional=True,
    replaces=True,
    **SCALED,
    **ON_RL,
)
def make_endpoint(endpoint: Any) -> Any:
    """Make an endpoint that steps with the trainer's scaler, if the trainer has a scaler."""

    async def step(trainer: Any, own: Callable[[], Awaitable[Any]]) -> Any:
        training = ScaledTraining.of(trainer)
        if training is None or not training.takes_part(trainer.optimizers):
            return await own()
        # After an exception the controller may call optim_step again without a new backward pass.
        with training.one_step(trainer.optimizers, tuple(trainer.optimizers)):
            output = await own()
        metrics = output.metrics
        metrics[_NORM] = training.norm(metrics[_NORM])
        metrics.update(training.metrics("trainer/"))
        return output

    return remake(endpoint, step, **{UNSCALES: True})
