"""The seams that audit Megatron's optimizers automatically.

In megatron-core 0.13 to 0.19 every optimizer has one of the three classes that are patched here.
Neither ``get_megatron_optimizer`` nor ``ChainedOptimizer`` is patched, because frameworks may have
their own copy of the former, which makes no chain. Delete this module when Megatron reports which
precision its optimizers really have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.auditing.automatic import watch
from precision_shim.auditing.record import Finding

from ..policy.requested import AUDIT, RequestedConfig
from ..training.build import Build, current_build
from ..training.ddp import compared_with
from ..training.optimizer import find_noted_codes

FEATURE = AUDIT
GROUP = "audit"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_FLAGS = {"bf16", "fp16", "params_dtype"}
_OF_FLAGS = {"params-dtype", "scaler-missing", "master-missing"}
"""Codes of the problems that arise if the user's ``_FLAGS`` do not fit the model."""


@seam(
    feature=FEATURE,
    at=[
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.__init__",
        f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params.__init__",
        f"{_OPTIMIZER}:FP32Optimizer.__init__",
    ],
    group=GROUP,
    why="every optimizer of Megatron's is made by one of three classes",
    delete_when="Megatron says which precision its optimizers have",
    optional=True,
)
def look_at(call: Call) -> Any:
    """Audit a new optimizer, and audit it again after its first step."""
    result = call.proceed()
    optimizer = call.instance
    build = current_build()
    requested = _requested(build)
    chunks = list(getattr(optimizer, "model_chunks", None) or ())
    config = getattr(optimizer, "config", None)
    watch(
        build.framework if build is not None else "",
        requested.subject if requested is not None else "",
        optimizer,
        inner=getattr(optimizer, "optimizer", None),
        model=chunks,
        by_user=_by_user(requested, chunks),
        wrote=() if requested is None else requested.written(),
        told=lambda problem: problem.code in find_noted_codes(config),
    )
    return result


def _requested(build: Build | None) -> RequestedConfig | None:
    """The settings of the model being built; ``None``, instead of an error, if unreadable."""
    try:
        return None if build is None else build.requested
    except Exception:  # the seams that wrap the optimizer report that settings are unreadable
        return None


def _by_user(requested: RequestedConfig | None, chunks: list[Any]) -> Callable[[Finding], bool]:
    """Make a function that returns whether a setting of the user causes a given problem."""
    codes = set()
    bucket = requested is not None and requested.bucket_in_fp32 is not None
    if bucket or any(chunk in compared_with for chunk in chunks):
        codes.add("main-grads-dtype")
    if requested is not None and not _FLAGS.isdisjoint(requested.asked):
        codes |= _OF_FLAGS
    return lambda problem: problem.code in codes
