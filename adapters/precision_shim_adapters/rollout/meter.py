"""Record the dtypes of a rollout engine's weights, to measure the updates lost to rounding."""

from __future__ import annotations

from typing import Any

from precision_shim.precision.agreement import ENGINE_NAMES
from precision_shim.precision.dtypes import CANONICAL
from precision_shim.updates import meters


def tell_meter(optimizer: Any, *names: str, merged: bool = False) -> None:
    """Record the dtypes in which the rollout engine receives the weights that an optimizer updates.

    Args:
        optimizer: the optimizer of a framework, Megatron or torch; ``None`` if nothing is trained.
        names: canonical names of the dtypes that a weight is rounded to, in order; the last name is
            the engine's dtype. If a name is not canonical, such as ``"auto"`` or ``"fp8"``, the
            meter measures nothing.
        merged: whether LoRA is merged into the weights before they are sent.
    """
    known = all(name in ENGINE_NAMES for name in names)
    dtypes = tuple(CANONICAL[name] for name in names) if known else ()
    meters.tell_rollout(optimizer, meters.Rollout(dtypes, merged))
