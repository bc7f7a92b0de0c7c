"""SkyRL on Megatron in fp16: a skipped step, the scaler's settings, and both in SkyRL's metrics.

SkyRL drops what Megatron's ``step`` says of success, and a grad norm that is None from its metrics:
a skipped step leaves no trace. It is given NaN as grad norm. The learning rate scheduler goes on,
as SkyRL has it go on.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import wrapt

from ..loss_scaling import steps_through
from ..megatron_overflow import (
    answer_a_skip,
    dynamic_scalers,
    metrics,
    scale_of,
    scaler_settings,
    skipping,
    with_scaler_settings,
)
from .config import KWARGS
from .megatron import dtype_to_build

_TINKERS_NORM = "skyrl.ai/grad_norm"
_SCALE, _SKIPPED = "loss_scale", "skipped_steps"
_scaled: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""Dispatches of a driver, to the models whose workers scale their loss."""

_log = logging.getLogger("precision_shim")


def step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``MegatronStrategy.optimizer_step``."""
    optimizer = inspect.signature(wrapped).bind(*args, **kwargs).arguments["optimizer"]
    with skipping("skyrl", "policy", succeeds=False), _counted(optimizer):
        grad_norm = wrapped(*args, **kwargs)
    if isinstance(grad_norm, float) and math.isnan(grad_norm):
        figures = metrics(optimizer)
        if figures:
            _log.warning(
                "skyrl policy: fp16 overflow at loss scale %g, the optimizer's step was skipped "
                "(%d so far)",
                figures["loss_scale"],
                figures["skipped_steps"],
            )
    return grad_norm


def _counted(optimizer: Any) -> AbstractContextManager[None]:
    """With a multi-token prediction head SkyRL puts a step of its own into the optimizer."""
    if "step" not in vars(optimizer):
        return nullcontext()

    def step(*args: Any, **kwargs: Any) -> Any:
        return answer_a_skip(optimizer.step, optimizer, args, kwargs)

    return steps_through(step, optimizer)


def note_scaled(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``WorkerDispatch.forward_backward``: the driver learns whose workers scale losses.

    Their metrics say so; the driver itself has no scaler to ask.
    """
    output = wrapped(*args, **kwargs)
    model = inspect.signature(wrapped).bind(*args, **kwargs).arguments["model"]
    scaled = _scaled.setdefault(instance, set())
    (scaled.add if _SCALE in _figures_in(output) else scaled.discard)(model)
    return output


def report_to_client(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around the Tinker backend's ``optim_step``: its answer is JSON, which knows no NaN.

    A skip is NaN where a scaler is at work. Elsewhere a norm that is not finite is a model that
    broke, and stays SkyRL's error.
    """
    output = wrapped(*args, **kwargs)
    norm = output.metrics.get(_TINKERS_NORM)
    if norm is None or not math.isnan(norm):
        return output
    model_id = inspect.signature(wrapped).bind(*args, **kwargs).arguments["model_id"]
    role_of = getattr(instance, "_get_role", None)  # 0.2 has a policy only
    role = role_of(model_id) if role_of is not None else "policy"
    if role in _scaled.get(instance._dispatch, ()):
        del output.metrics[_TINKERS_NORM]
        output.metrics["skyrl.ai/skipped_step"] = 1.0
    return output


def report(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``forward_backward``: loss scale and skipped steps beside the loss."""
    output = wrapped(*args, **kwargs)
    optimizer = getattr(instance, "optimizer", None)
    if optimizer is not None:
        add_figures(output, metrics(optimizer) or _first_figures(optimizer))
    return output


def _first_figures(optimizer: Any) -> dict[str, float]:
    """The same before the first step, which is the likeliest to be skipped."""
    scalers = dynamic_scalers(optimizer)
    return {_SCALE: scale_of(scalers[0]), _SKIPPED: 0.0} if scalers else {}


def add_figures(output: Any, figures: dict[str, float]) -> None:
    """Put figures among a worker's metrics."""
    found = _figures_in(output)
    if found:  # no microbatch, no metrics
        found.update(figures)


def _figures_in(output: Any) -> dict[str, Any]:
    """A worker's metrics: a dict of them (0.2), or a record with one (0.3)."""
    found = output if isinstance(output, dict) else getattr(output, "metrics", None)
    return {} if found is None else found


def keep_last(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``reduce_metrics``: of a scale and a count the last value, where SkyRL takes means."""
    reduced = wrapped(*args, **kwargs)
    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments["metrics"]
    reduced.update({key: given[key][-1] for key in (_SCALE, _SKIPPED) if key in reduced})
    return reduced


def scale_from_settings(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Bring the variables that the user set beneath ``optimizer_config_kwargs``.

    Raises:
        SettingsError: the first scale is below the scaler's minimum.
    """
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    written = dict(bound.arguments[KWARGS] or {})
    if not scaler_settings() or dtype_to_build(written) is not torch.float16:
        return wrapped(*args, **kwargs)
    bound.arguments[KWARGS] = with_scaler_settings(written, KWARGS)
    return wrapped(*bound.args, **bound.kwargs)


# -- weights to the inference engines ----------------------------------------------------------


class _Bf16Sized(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A Megatron-Bridge whose conversion tasks show fp16 weights as bf16 ones, of equal size."""

    def get_conversion_tasks(self, *args: Any, **kwargs: Any) -> Any:
        return [_resized(task) for task in self.__wrapped__.get_conversion_tasks(*args, **kwargs)]


def _resized(task: Any) -> Any:
    weight = getattr(task, "param_weight", None)
    if weight is None or weight.dtype is not torch.float16:
        return task
    return dataclasses.replace(task, param_weight=weight.detach().view(torch.bfloat16))


def size_fp16(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``MegatronWeightExtractor._init_param_buckets``, which knows the sizes of two dtypes.

    It keeps indices only: the weights themselves are read anew for every transfer.
    """
    bridge = instance.bridge
    instance.bridge = _Bf16Sized(bridge)
    try:
        return wrapped(*args, **kwargs)
    finally:
        instance.bridge = bridge
