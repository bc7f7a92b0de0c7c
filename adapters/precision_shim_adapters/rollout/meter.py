"""Tell the lost-update meter in which dtypes a trainer's weights reach the rollout engine."""

from __future__ import annotations

from typing import Any

from precision_shim.precision.agreement import ENGINE_NAMES
from precision_shim.precision.dtypes import CANONICAL
from precision_shim.updates import meters


def tell_meter(optimizer: Any, *names: str, merged: bool = False) -> None:
    """Note how an optimizer's weights reach the rollout engine.

    Args:
        optimizer: the optimizer of a framework, Megatron or torch; ``None`` where nothing is
            trained.
        names: canonical names of the dtypes that a weight is rounded to, in order; the last is the
            engine's. If one is no such name, for example ``"auto"`` or ``"fp8"``, nothing is
            measured.
        merged: whether LoRA is merged into the weights before they are sent.
    """
    known = all(name in ENGINE_NAMES for name in names)
    dtypes = tuple(CANONICAL[name] for name in names) if known else ()
    meters.tell_rollout(optimizer, meters.Rollout(dtypes, merged))
