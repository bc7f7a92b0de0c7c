"""Loss scaling for both torchtitan trainers: scale the innermost loss, unscale before clipping.

``ChunkedLossWrapper`` runs each chunk's backward pass itself, and a pipeline's schedule stores the
loss function when the schedule is built. The gradients would stay unscaled if the shim scaled the
loss that ``ChunkedLossWrapper`` or the schedule returns, or replaced ``trainer.loss_fn``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from precision_shim.adapting import Call, current_settings, seam, versioned, warn
from precision_shim.adapting.scaling import LossScaler, states_of_no_step
from precision_shim.errors import UnsupportedPrecisionError

from ...torch_fp16 import FEATURE, ScaledTraining
from ...torch_fp16.stepping import ScaledLoss
from ..config import BECAUSE, find_unscaled, refuse_float16_states
from . import attention
from .trainers import BOTH, FRAMEWORK, SCALED


def make(trainer: Any, subject: str) -> ScaledTraining:
    """Make a float16 model's ``ScaledTraining``, and store it on the trainer."""
    refuse_float16_states(trainer.config.training)
    device = trainer.device.type
    return ScaledTraining.make(FRAMEWORK, subject, device=device, because=BECAUSE).keep(trainer)


def tell_unscaled(training: Any, place: str = "training") -> None:
    """Warn of float16 sums of gradients of an unscaled loss; ``place`` is the config's key."""
    if message := find_unscaled(training, place):
        warn(message)


def leave(name: str, own: Iterable[str], instead: str) -> None:
    """Warn (strict: raise) that the shim does not scale a float16 loss.

    ``own`` are methods of the trainer's class ``name`` that are not torchtitan's; the message
    recommends ``instead``.
    """
    message = (
        f"{versioned('torchtitan')}: {name} has its own {', '.join(own)}, which the shim does not "
        f"know: its float16 training gets no loss scaling. Train in bfloat16, or {instead}."
    )
    if current_settings().strict:
        raise UnsupportedPrecisionError(message)
    warn(message)


def scale_innermost(trainer: Any, attach: Callable[[torch.Tensor], None]) -> None:
    """Make torchtitan call ``attach`` with each loss before the loss's backward pass."""
    from torchtitan.components.loss import ChunkedLossWrapper

    loss_fn = trainer.loss_fn
    schedule = getattr(trainer, "pp_schedule", None)
    if isinstance(loss_fn, ChunkedLossWrapper):
        loss_fn.loss_fn = ScaledLoss(loss_fn.loss_fn, attach)
    elif schedule is None:
        trainer.loss_fn = ScaledLoss(loss_fn, attach)
    elif schedule._loss_fn is not None:  # only the last pipeline stage has a loss function
        schedule._loss_fn = ScaledLoss(schedule._loss_fn, attach)


def ready(training: ScaledTraining, trainer: Any, step: str) -> None:
    """Store the loss-scaling object on the optimizers; report attention's and experts' dtypes.

    ``step``: the path of the trainer's function that steps.
    """
    for optimizer in trainer.optimizers:
        training.keep(optimizer)
    training.guard(trainer, step, lambda trainer: trainer.optimizers)
    attention.tell(training.subject, trainer.model_parts)


@seam(
    "torchtitan.distributed.utils:clip_grad_norm_",
    at=BOTH,
    why="the first look at the gradients: norm and clipping want them unscaled",
    **SCALED,
)
def clip(call: Call, parameters: Any, max_norm: Any) -> Any:
    """Unscale the gradients before torchtitan computes their norm and clips them."""
    training = ScaledTraining.current()
    if training is None or training.framework != FRAMEWORK:
        return call.proceed()
    with training.before_clipping():
        norm = call.proceed()
    overflow = training.scaler.overflow if isinstance(training.scaler, LossScaler) else None
    if overflow is None:
        return norm
    # Newer Trainers assert a finite norm before the step. If gradients overflowed, return the norm
    # 0, computed on the device so that no CPU waits. The metrics report NaN for a skipped step.
    return torch.where(overflow.to(norm.device, non_blocking=True), torch.zeros_like(norm), norm)


@seam(
    "torchtitan.components.optimizer.utils:init_optim_state",
    FEATURE,
    at=BOTH,
    why="it counts its dummy step, and does nothing where gradients are set: a save before the "
    "first step that is not skipped could not be resumed exactly, or not loaded",
    delete_when="init_optim_state takes no step, and does not look at gradients",
    relies_on=("grad", "step"),
    aliases=("torchtitan.components.optimizer.optimizer:init_optim_state",),
)
def init_optim_state(call: Call, optim: Any) -> Any:
    """Create an optimizer's states with a step count of 0, if the loss is scaled."""
    if ScaledTraining.of(optim) is None or optim.state:
        return call.proceed()
    return states_of_no_step(optim, call.proceed)
