"""NeMo-RL: where in DTensor workers model and optimizer first stand together; and all metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from precision_shim.adapting import Call, around, in_force, seam
from precision_shim.auditing.watching import watch
from precision_shim.updates import meters

from ..fp16 import ScaledTraining
from ..ray_actors import put_in_front
from .dtensor import TRAIN
from .places import DTENSOR, MEGATRON, at_actor_class

FRAMEWORK = "nemo-rl"
FEATURE = "audit"
_DELETE = "NeMo-RL says which precision its optimizers have"
_RELIES_ON = ("__init__", "optimizer", "model")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def see(worker: Any) -> None:
    """Audit a worker's optimizer, if it has one."""
    optimizer = getattr(worker, "optimizer", None)

    def scaler() -> Any:
        training = ScaledTraining.of(worker)
        return None if training is None else training.scaler

    names = {kind.__name__ for kind in type(worker).__mro__}
    group = next((one.group for one in DTENSOR if {one.name, f"{one.name}Impl"} & names), "")
    if optimizer is not None and in_force(FRAMEWORK, FEATURE, group):
        watch(
            FRAMEWORK,
            "value" if group == "dtensor value" else "policy",
            optimizer,
            model=worker.model,
            scaler=scaler,
        )


class AuditedWorker:
    """A mixin in front of a worker's class; importable, so that Ray ships it by reference."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        see(self)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and report the lost updates where there are figures."""
        method = super().train  # type: ignore[misc]
        return around(report_lost_updates, method, self, args, kwargs, positional=TRAIN)


def _on_each_actor_class(function: _Function) -> _Function:
    for worker in reversed(DTENSOR):
        at_actor_class(
            function,
            FEATURE,
            worker,
            worker.beneath,
            _RELIES_ON,
            delete_when=_DELETE,
            optional=worker.optional,
        )
    return function


@_on_each_actor_class
def redecorate(actor_class: Any) -> Any:
    """Make an actor class of the same name and options whose worker is audited.

    Raises:
        SeamError: it is not what ``ray.remote`` makes of a class.
    """
    return put_in_front(AuditedWorker, actor_class)


def _on_each_worker(function: _Function) -> _Function:
    for worker in reversed(DTENSOR):
        seam(
            f"{worker.beneath}.__init__",
            FEATURE,
            group=worker.group,
            why="workers under other names inherit from this class",
            delete_when=_DELETE,
            relies_on=("optimizer", "model"),
            only_if=(*worker.only_if, worker.beneath),
            unless=worker.unless,
        )(function)
    return function


@_on_each_worker
def look_at(call: Call) -> Any:
    """Audit a worker that was made; one in a class of ours when that is done with it."""
    result = call.proceed()
    if not isinstance(call.instance, AuditedWorker):
        see(call.instance)
    return result


# -- the metrics --------------------------------------------------------------------------------


def _on_each_train(function: _Function) -> _Function:
    for worker in reversed((*DTENSOR, *MEGATRON)):
        target = f"{worker.beneath}.train"
        seam(
            target,
            FEATURE,
            group=worker.metrics,
            why="workers under other names inherit from this class",
            delete_when="NeMo-RL says which of its updates are lost to rounding",
            relies_on=("train", "optimizer", "all_mb_metrics", "eval_mode"),
            optional=True,
            only_if=(*worker.only_if, target),
            unless=worker.unless,
        )(function)
    return function


@_on_each_train
def report_lost_updates(call: Call, eval_mode: Any = False) -> Any:
    """Put the shares of lost updates among the metrics of a worker's ``train``.

    Once per call and on rank 0: NeMo-RL passes on only the lists in ``all_mb_metrics``, and sums
    most of them over micro-batches and ranks.
    """
    result = call.proceed()
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if not eval_mode and first:
        for name, value in meters.metrics(getattr(call.instance, "optimizer", None)).items():
            result["all_mb_metrics"][name] = [value]
    return result
