"""Pre-training and SFT in float16, in ``Trainer`` and in subclasses with Trainer's loop."""

from __future__ import annotations

from typing import Any

import torch

from precision_shim.adapting import Call, in_force, seam, versioned, warn

from ...torch_fp16 import FEATURE, ScaledTraining
from ..config import computes_in_float16
from .loss_scaling import leave, make, ready, scale_innermost, tell_unscaled
from .trainers import FRAMEWORK, METRICS, ON_PRETRAINING, SCALED, TRAINER

_LOOP = (
    "train_step",
    "forward_backward_step",
    "_forward_backward_body",
    "pp_forward_backward_step",
)
"""``Trainer``'s methods for losses and steps; if a subclass overrides one, no loss is scaled."""


@seam(
    f"{TRAINER}.__init__",
    why="the loss function and the pipeline's schedule exist; the checkpoint is loaded in train()",
    relies_on=(
        *(*_LOOP, "loss_fn", "pp_schedule"),
        *("optimizers", "model_parts", "checkpointer", "device"),
    ),
    **SCALED,
    **ON_PRETRAINING,
)
def build(call: Call, config: Any) -> None:
    """Build a trainer; for a model that computes in float16, make a scaler and scale the loss."""
    trainer = call.instance
    tell_unscaled(config.training)
    fits = not computes_in_float16(config.training) or _has_our_loop(trainer)
    call.proceed()
    if not fits or not computes_in_float16(config.training):  # __init__ may change the config
        return
    training = make(trainer, "model")

    def attach(loss: torch.Tensor) -> None:
        if ScaledTraining.current() is training:
            training.attach(loss)
        elif loss.requires_grad and in_force(FRAMEWORK, FEATURE, ON_PRETRAINING["group"]):
            warn(
                f"{versioned('torchtitan')}: a loss of {type(trainer).__name__} was formed outside "
                "of its train_step, by a loop that unscales nothing: it is not scaled, and "
                "float16 loses small gradients. Call train_step, or train in bfloat16."
            )

    scale_innermost(trainer, attach)
    ready(training, trainer, "train_step")


def _has_our_loop(trainer: Any) -> bool:
    """Whether a trainer inherits the loop of ``Trainer``; if not, warn (strict: raise)."""
    from torchtitan.trainer import Trainer

    kind = type(trainer)
    own = [name for name in _LOOP if getattr(kind, name, None) is not getattr(Trainer, name, None)]
    if own:
        leave(kind.__name__, own, "with Trainer's own loop")
    return not own


@seam(
    feature=FEATURE,
    at=[
        {
            "target": "torchtitan.experiments.forge.engine:ForgeEngine.__init__",
            "group": "forge",
            "why": "says so where float16 is asked for, instead of training unscaled",
            "refusal": "Forge's engine leaves the training loop to its user",
        },
        {
            "target": "torchtitan.experiments.torchft.trainer:FaultTolerantTrainer.__init__",
            "group": "torchft",
            "why": "says so where float16 is asked for: it derives from Trainer, and never calls "
            "its __init__",
            "refusal": "TorchFT's trainer has its own __init__ and train_step",
        },
    ],
    delete_when="its loop is Trainer's",
    optional=True,
)
def other_loop(call: Call, config: Any) -> Any:
    """Warn (strict: raise) that the shim does not scale the trainer's float16 loss."""
    tell_unscaled(config.training)
    if computes_in_float16(config.training):
        leave(type(call.instance).__name__, ["__init__", "training loop"], "with Trainer")
    return call.proceed()


@seam(
    f"{TRAINER}.train_step",
    why="forms the losses of one step, clips and steps",
    relies_on=("clip_grad_norm_", "optimizers", "lr_schedulers", "metrics_processor", "zero_grad"),
    **SCALED,
    **ON_PRETRAINING,
)
def train_step(call: Call) -> Any:
    """Run torchtitan's step so that the scaler steps the optimizers."""
    training = ScaledTraining.of(call.instance)
    if training is None:
        return call.proceed()
    optimizers = call.instance.optimizers
    with training.several_steps(optimizers, tuple(optimizers)):
        return call.proceed()


@seam(
    "torchtitan.components.metrics:MetricsProcessor.log",
    why="the figures of a step, where they are logged",
    **SCALED,
    **{**ON_PRETRAINING, "group": METRICS},
)
def log(call: Call, grad_norm: Any, extra_metrics: Any = None) -> Any:
    """Log the scaler's metrics next to the grad norm, which is NaN for a skipped step."""
    training = ScaledTraining.current()
    if training is not None and training.framework == FRAMEWORK:
        call.arguments["grad_norm"] = training.norm(grad_norm)
        call.arguments["extra_metrics"] = {**(extra_metrics or {}), **training.metrics()}
    return call.proceed()
