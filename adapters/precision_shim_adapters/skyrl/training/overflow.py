"""SkyRL on Megatron in fp16: report skipped steps in SkyRL's metrics, with grad norm NaN.

SkyRL ignores the success flag of Megatron's ``step``, and omits a grad norm of None from its
metrics. Even with the shim, SkyRL's learning rate scheduler counts skipped steps.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import wrapt

from precision_shim.adapting import Call, seam

from ...megatron import GROUP, SCALING, answer_step, metrics, skipping
from ...torch_fp16.stepping import steps_through
from .megatron import TRAIN, WORKER

_TINKERS_NORM = "skyrl.ai/grad_norm"
_SCALE, _SKIPPED = "loss_scale", "skipped_steps"
_scaled: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""Maps a driver's ``WorkerDispatch`` to the models whose workers scale the loss."""

_log = logging.getLogger("precision_shim")


BASE = f"{TRAIN}.workers.worker"
_FP16: dict[str, Any] = {"feature": SCALING, "optional": True}


@seam(
    f"{TRAIN}.distributed.megatron.megatron_strategy:MegatronStrategy.optimizer_step",
    group=GROUP,
    why="drops what Megatron's step says of success",
    delete_when="SkyRL counts and reports skipped steps",
    relies_on=("step", "scheduler"),
    **_FP16,
)
def step(call: Call, optimizer: Any) -> Any:
    """Return NaN as the grad norm of a skipped step of a policy worker, and log the skip."""
    with skipping(succeeds=False), _count_steps(optimizer):
        grad_norm = call.proceed()
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


def _count_steps(optimizer: Any) -> AbstractContextManager[None]:
    """Count steps even if SkyRL, for multi-token prediction, replaced the optimizer's ``step``."""
    if "step" not in vars(optimizer):
        return nullcontext()

    def step(*args: Any, **kwargs: Any) -> Any:
        return answer_step(optimizer, lambda: optimizer.step(*args, **kwargs))

    return steps_through(step, optimizer)


@seam(
    f"{TRAIN}.workers.worker_dispatch:WorkerDispatch.forward_backward",
    group="tinker",
    why="the driver sees here which model's workers scale their loss",
    delete_when="SkyRL's optim_step says which steps were skipped",
    **_FP16,
)
def note_scaled(call: Call, model: Any) -> Any:
    """Record on the driver, which has no scaler, whether the workers' metrics have a loss scale."""
    output = call.proceed()
    scaled = _scaled.setdefault(call.instance, set())
    (scaled.add if _SCALE in _figures_in(output) else scaled.discard)(model)
    return output


@seam(
    "skyrl.backends.skyrl_train_backend:SkyRLTrainBackend.optim_step",
    group="tinker",
    why="the Tinker server's answer is JSON, in which a grad norm of NaN is an error",
    delete_when="it leaves out what is not finite",
    relies_on=("metrics", "grad_norm", "_dispatch"),
    **_FP16,
)
def report_to_client(call: Call, model_id: Any) -> Any:
    """Remove a skipped step's NaN grad norm from the JSON reply to a Tinker client.

    In a job without loss scaling, NaN means divergence, and SkyRL's error stays.
    """
    output = call.proceed()
    norm = output.metrics.get(_TINKERS_NORM)
    if norm is None or not math.isnan(norm):
        return output
    role_of = getattr(call.instance, "_get_role", None)  # SkyRL 0.2 has no ``_get_role``
    role = role_of(model_id) if role_of is not None else "policy"
    if role in _scaled.get(call.instance._dispatch, ()):
        del output.metrics[_TINKERS_NORM]
        output.metrics["skyrl.ai/skipped_step"] = 1.0
    return output


@seam(
    f"{WORKER}:MegatronPolicyWorkerBase.forward_backward",
    group=GROUP,
    why="returns the metrics that the trainer logs, reduced over the ranks",
    delete_when="SkyRL reports the loss scale",
    relies_on=("all_reduce_metrics",),
    **_FP16,
)
def report(call: Call) -> Any:
    """Add loss scale and skipped steps to the metrics of a policy worker's pass."""
    output = call.proceed()
    optimizer = getattr(call.instance, "optimizer", None)
    if optimizer is not None:
        add_figures(output, metrics(optimizer, from_start=True))
    return output


def add_figures(output: Any, figures: dict[str, float]) -> None:
    """Add values to a worker's metrics."""
    found = _figures_in(output)
    if found:  # without micro-batches SkyRL expects no metrics
        found.update(figures)


def _figures_in(output: Any) -> dict[str, Any]:
    """Return a worker's metrics: in SkyRL 0.2 the output itself, from 0.3 its field ``metrics``."""
    figures = output if isinstance(output, dict) else getattr(output, "metrics", None)
    return {} if figures is None else figures


@seam(
    f"{TRAIN}.workers.worker_utils:reduce_metrics",
    SCALING,
    group="trainer",
    why="takes means over a step's mini-batches, of a loss scale and a count too",
    delete_when="it has a reduction for the last value",
    aliases=tuple(f"{name}:reduce_metrics" for name in ("skyrl.train.trainer", BASE, WORKER)),
)
def keep_last(call: Call, metrics: Any) -> Any:
    """Report the last loss scale and skipped-step count, not the means over mini-batches."""
    reduced = call.proceed()
    reduced.update({key: metrics[key][-1] for key in (_SCALE, _SKIPPED) if key in reduced})
    return reduced


class _Bf16Sized(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A proxy for Megatron-Bridge that returns fp16 weights as bf16 views of the same size."""

    def get_conversion_tasks(self, *args: Any, **kwargs: Any) -> Any:
        return [_resize(task) for task in self.__wrapped__.get_conversion_tasks(*args, **kwargs)]


def _resize(task: Any) -> Any:
    weight = getattr(task, "param_weight", None)
    if weight is None or weight.dtype is not torch.float16:
        return task
    return dataclasses.replace(task, param_weight=weight.detach().view(torch.bfloat16))


@seam(
    f"{WORKER}:MegatronWeightExtractor._init_param_buckets",
    group="megatron weight sync",  # training is correct without this seam
    only_if=(f"{WORKER}:MegatronWeightExtractor",),
    why="its table of sizes has no fp16: sending the weights would end in a KeyError",
    delete_when="its table of sizes has fp16",
    relies_on=("prec_to_bytes", "get_conversion_tasks"),
    **_FP16,
)
def size_fp16(call: Call) -> Any:
    """Make the weight extractor, whose table of sizes lacks fp16, use bf16's size for fp16.

    ``_init_param_buckets`` stores only indices, so the extractor sends no bf16 views.
    """
    bridge = call.instance.bridge
    call.instance.bridge = _Bf16Sized(bridge)
    try:
        return call.proceed()
    finally:
        call.instance.bridge = bridge
