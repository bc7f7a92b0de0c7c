"""The RL trainer in float16: ``PolicyTrainer``, a Monarch actor.

Its endpoints are objects that an actor looks up by name, and a wrapper around one is not called. So
``optim_step`` is made again as an endpoint. The gradients are made by another endpoint before: what
is scaled there is unscaled by an ``optim_step`` of ours, or nothing is scaled.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from precision_shim.adapting import Call, current_settings, in_force, seam, warn
from precision_shim.errors import SeamError, UnsupportedPrecisionError
from precision_shim.rules.dtypes import parse_dtype

from ..fp16 import FEATURE, ScaledTraining
from ..fp16.stepping import has_gradients
from .places import (
    DELETE,
    FRAMEWORK,
    OWN_NAMES,
    POLICY,
    RL,
    UPSTREAM,
    computes_in_float16,
    native_rl,
    where,
)
from .scaled import make, note_generator, ready, scale_innermost

_NORM = "trainer/grad_norm/mean"
_OURS = "_precision_shim_endpoint"


@seam(
    f"{POLICY}._build_model",
    FEATURE,
    group=RL,
    why="the loss function exists, and the checkpoint is loaded later, within __init__",
    upstream=UPSTREAM,
    delete_when=DELETE,
    relies_on=("loss_fn", "set_lm_head", "checkpointer", "optimizers", "model_parts", "device"),
    native=native_rl,
    optional=True,
)
def build(call: Call, config: Any) -> Any:
    """Build the model; for one that computes in float16 make the scaler and scale its loss."""
    model = call.proceed()
    trainer = call.instance
    if not computes_in_float16(config.training) or not _steps_through_us(trainer):
        return model
    training = make(trainer, "policy")

    def attach(loss: torch.Tensor) -> None:
        if in_force(FRAMEWORK, FEATURE, RL):
            training.attach(loss)

    scale_innermost(trainer, attach)
    return model


def _steps_through_us(trainer: Any) -> bool:
    """Whether the step of a trainer is ours; says so where a subclass has one of its own."""
    if hasattr(type(trainer).optim_step, _OURS):
        return True
    message = (
        f"{where()}: {type(trainer).__name__} has an optim_step of its own, which unscales "
        "nothing: its float16 training gets no loss scaling. Leave it to PolicyTrainer's, or train "
        "in bfloat16."
    )
    if current_settings().strict:
        raise UnsupportedPrecisionError(message)
    warn(message)
    return False


@seam(
    f"{POLICY}.__init__",
    FEATURE,
    group=RL,
    why="the optimizers exist, and the generator's dtype is known",
    upstream=UPSTREAM,
    delete_when=DELETE,
    native=native_rl,
    optional=True,
)
def build_trainer(call: Call, generator_dtype: Any) -> None:
    """Build a trainer, and note what belongs to its scaled training."""
    call.proceed()
    training = ScaledTraining.of(call.instance)
    if training is None:
        return
    ready(training, call.instance)
    generated = parse_dtype(str(generator_dtype))
    if generated is not None and generated is not torch.float16:
        note_generator(training.subject, OWN_NAMES.get(generated, str(generated)))


@seam(
    f"{POLICY}.optim_step",
    FEATURE,
    group=RL,
    why="clips, steps and reports",
    upstream=UPSTREAM,
    delete_when=DELETE,
    relies_on=(
        "clip_grad_norm_",
        "optimizers",
        "lr_schedulers",
        "zero_grad",
        "policy_version",
        "OptimStepOutput",
        "concurrent_endpoint",
        _NORM,
    ),
    native=native_rl,
    optional=True,
    replaces=True,
)
def make_endpoint(endpoint: Any) -> Any:
    """Make an endpoint that steps through the scaler where its trainer has one.

    Raises:
        SeamError: it is not what Monarch's ``concurrent_endpoint`` makes.
    """
    from monarch.actor import concurrent_endpoint

    method = getattr(getattr(endpoint, "_method", None), "__wrapped__", None)
    if method is None or not hasattr(endpoint, "_propagator"):
        raise SeamError(f"{endpoint!r} is not an endpoint as concurrent_endpoint makes it")

    @functools.wraps(method)
    async def optim_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        training = ScaledTraining.of(self)
        if training is None or not has_gradients(self.optimizers):
            return await method(self, *args, **kwargs)
        with training.several_steps(self.optimizers, tuple(self.optimizers)):
            output = await method(self, *args, **kwargs)
        metrics = output.metrics
        metrics[_NORM] = training.norm(metrics[_NORM])
        metrics.update(training.metrics("trainer/"))
        return output

    made = concurrent_endpoint(optim_step, propagate=endpoint._propagator)
    made.__set_name__(None, "optim_step")  # Python does this where a class is defined
    setattr(made, _OURS, True)
    return made
