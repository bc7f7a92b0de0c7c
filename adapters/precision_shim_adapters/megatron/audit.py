"""The audit by itself, where every optimizer of Megatron's passes.

``get_megatron_optimizer`` is not that place: frameworks have copies of it, and make no chained
optimizer. These three classes see every optimizer in megatron-core 0.13 to 0.19.

Delete when: Megatron says which precision its optimizers really have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from precision_shim.adapting import Call, seam
from precision_shim.auditing.record import Finding
from precision_shim.auditing.watching import watch

from .build import current_build
from .ddp import told_of

FEATURE = "audit"
GROUP = "audit"
PATHS = {GROUP: "Megatron's optimizers"}

_OPTIMIZER = "megatron.core.optimizer.optimizer"
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _on_each_optimizer(function: _Function) -> _Function:
    for target in (
        f"{_OPTIMIZER}:FP32Optimizer.__init__",
        f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params.__init__",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.__init__",
    ):
        seam(
            target,
            FEATURE,
            group=GROUP,
            why="every optimizer of Megatron's is made by one of three classes",
            delete_when="Megatron says which precision its optimizers have",
            optional=True,
        )(function)
    return function


@_on_each_optimizer
def look_at(call: Call) -> Any:
    """Audit an optimizer that is made, and again after its first step."""
    result = call.proceed()
    optimizer = call.instance
    build = current_build()
    wishes = build.wishes if build is not None else None  # as they are now: the hook comes later
    chunks = list(getattr(optimizer, "model_chunks", None) or ())
    written = (wishes is not None and wishes.bucket_in_fp32 is not None) or any(
        told_of(chunk) is not None for chunk in chunks
    )

    def by_user(problem: Finding) -> bool:
        return written and problem.code == "main-grads-dtype"

    watch(
        build.framework if build is not None else "",
        wishes.subject if wishes is not None else "",
        optimizer,
        inner=getattr(optimizer, "optimizer", None),
        model=chunks,
        by_user=by_user,
    )
    return result
