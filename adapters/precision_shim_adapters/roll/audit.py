"""Audit ROLL's optimizer on FSDP2."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.adapting.audit import watch

from .checkpoints import FSDP2
from .training import STRATEGY, written


@seam(
    f"{STRATEGY}.initialize",
    "audit",
    group=FSDP2,
    why="model, optimizer and scaler stand together for the first time",
    delete_when="ROLL says which precision its optimizers have",
    relies_on=("optimizer", "model", "scaler"),
    optional=True,
)
def audit(call: Call) -> Any:
    """Audit the optimizer of a strategy that trains."""
    result = call.proceed()
    strategy = call.instance
    name = strategy.worker_config.name
    watch(
        "roll",
        name,
        strategy.optimizer,
        model=strategy.model,
        scaler=(strategy, attrgetter("scaler")),
        fp32_key=f"leave {name}.strategy_args.strategy_config.param_dtype out",
        wrote=written(strategy),
    )
    return result
