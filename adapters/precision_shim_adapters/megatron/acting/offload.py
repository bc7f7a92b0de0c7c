"""Optimizer offload: FusedAdam's master weights move with the moments.

Each framework has a function that moves Megatron's optimizer states onto the CPU during generation,
and that function lists the moments by name. A precision-aware optimizer keeps its fp32 master
weights beside the moments, as ``master_param``. A list without ``master_param`` leaves 4 bytes per
parameter on the GPU.

Delete when: each framework's list has ``master_param`` (in verl 0.9 and later it does).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precision_shim.adapting import Call, Seam, Settings, Symbol

PATHS = {"offload": "Megatron (offload of states)"}
"""Maps the group of this file's seams to its name for users."""


def seams(module: str, importers: tuple[str, ...], why: str, delete_when: str) -> list[Seam]:
    """The seams at a framework's two offload functions, which have the same names in each.

    Args:
        module: where ``offload_megatron_optimizer`` and ``load_megatron_optimizer`` are.
        importers: modules that import these functions by value.
        why: see ``Seam``.
        delete_when: see ``Seam``.
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
    """Return a remark if the framework's own function moves the master weights."""
    return "the masters are moved already" if "master_param" in symbol.names else None


def offload_masters(call: Call, optimizers: Any) -> Any:
    """Move the master weights to the CPU before the framework empties torch's memory cache."""
    for state in _fused_states(optimizers):
        state["master_param"] = state["master_param"].to("cpu", non_blocking=True)
    return call.proceed()


def load_masters(call: Call, optimizers: Any) -> Any:
    """Bring the master weights back to the device to which the framework moves the moments."""
    result = call.proceed()
    for state in _fused_states(optimizers):
        device = state["exp_avg"].device
        state["master_param"] = state["master_param"].to(device, non_blocking=True)
    return result


def _fused_states(optimizers: Any) -> Iterator[dict[str, Any]]:
    """FusedAdam's states that hold ``master_param``, of one optimizer or of a chain."""
    for one in getattr(optimizers, "chained_optimizers", [optimizers]):
        # Megatron's offloading optimizer moves its own sub_optimizers.
        if one.optimizer is not None and not hasattr(one.optimizer, "sub_optimizers"):
            yield from (state for state in one.optimizer.state.values() if "master_param" in state)
