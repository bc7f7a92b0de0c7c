"""Offload FusedAdam's master weights to the CPU together with the moments.

A framework moves the states to the CPU during generation by a list of names. If the list lacks
``master_param``, a precision-aware optimizer's fp32 masters, 4 bytes per parameter, stay on the
GPU. Delete this module when each framework's list has it (verl's has it from 0.9).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precision_shim.adapting import Call, Seam, Settings, Symbol


def seams(module: str, importers: tuple[str, ...], why: str, delete_when: str) -> list[Seam]:
    """The seams at a framework's two offload functions, which have the same names everywhere.

    ``module`` defines both; ``importers`` are the modules that import them by name.
    """
    return [
        Seam(
            target=f"{module}:{name}",
            feature="bf16-dispatch",
            wrapper=wrapper,
            group="offload",
            why=why,
            delete_when=delete_when,
            relies_on=("exp_avg", "exp_avg_sq"),
            aliases=tuple(f"{importer}:{name}" for importer in importers),
            native=moved_already,
        )
        for name, wrapper in (
            ("offload_megatron_optimizer", offload_masters),
            ("load_megatron_optimizer", load_masters),
        )
    ]


def moved_already(symbol: Symbol, settings: Settings) -> str | None:
    """Return a remark if the framework's function moves the master weights, else ``None``."""
    return "the masters are moved already" if "master_param" in symbol.names else None


def offload_masters(call: Call, optimizers: Any) -> Any:
    """Move the master weights to the CPU before the framework empties torch's memory cache."""
    for state in _fused_states(optimizers):
        state["master_param"] = state["master_param"].to("cpu", non_blocking=True)
    return call.proceed()


def load_masters(call: Call, optimizers: Any) -> Any:
    """Move the master weights to the device to which the framework has moved the moments."""
    result = call.proceed()
    for state in _fused_states(optimizers):
        device = state["exp_avg"].device
        state["master_param"] = state["master_param"].to(device, non_blocking=True)
    return result


def _fused_states(optimizers: Any) -> Iterator[dict[str, Any]]:
    """Yield the states of FusedAdam that contain ``master_param``, of one optimizer or a chain."""
    for inner in getattr(optimizers, "chained_optimizers", [optimizers]):
        # Megatron's optimizer for CPU offload itself moves the states of its sub_optimizers.
        if inner.optimizer is not None and not hasattr(inner.optimizer, "sub_optimizers"):
            yield from (
                state for state in inner.optimizer.state.values() if "master_param" in state
            )
