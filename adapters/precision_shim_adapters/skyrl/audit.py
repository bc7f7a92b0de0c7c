"""SkyRL: where on FSDP a model and its torch optimizer first stand together; and all metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from precision_shim.adapting import Call, seam
from precision_shim.auditing.watching import watch
from precision_shim.updates import meters

from ..fp16 import ScaledTraining
from .megatron import WORKER
from .overflow import BASE, add_figures

_Function = TypeVar("_Function", bound=Callable[..., Any])


@seam(
    "skyrl.backends.skyrl_train.distributed.fsdp_strategy:FSDPStrategy._fsdp_init_train_model",
    "audit",
    group="fsdp",
    why="makes the optimizer of policy and critic",
    delete_when="SkyRL says which precision its optimizers have",
    relies_on=("AdamW",),
)
def train_model(call: Call) -> Any:
    """Audit the optimizer of a policy or a critic."""
    model, optimizer, scheduler = call.proceed()
    strategy = call.instance

    def scaler() -> Any:
        training = ScaledTraining.of(strategy)
        return None if training is None else training.scaler

    if optimizer is not None:
        watch(
            "skyrl",
            "policy" if type(model).__name__ == "HFModelWrapper" else "critic",
            optimizer,
            model=model,
            scaler=scaler,
        )
    return model, optimizer, scheduler


def _on_each_pass(function: _Function) -> _Function:
    # In the order of decorators that stand above one another: the lowest is applied first.
    for worker in (
        f"{BASE}:CriticWorkerBase",
        f"{BASE}:PolicyWorkerBase",
        f"{WORKER}:MegatronPolicyWorkerBase",
    ):
        seam(
            f"{worker}.forward_backward",
            "audit",
            group="metrics",
            why="returns the metrics that the trainer logs, reduced over the ranks",
            delete_when="SkyRL says which of its updates are lost to rounding",
            relies_on=("all_reduce_metrics", "optimizer"),
            optional=True,
        )(function)
    return function


@_on_each_pass
def report_lost_updates(call: Call) -> Any:
    """Put the shares of lost updates beside the loss of a pass."""
    output = call.proceed()
    add_figures(output, meters.metrics(getattr(call.instance, "optimizer", None)))
    return output
