"""The lost-update meters of this process, and the metrics that they give."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import lost

if TYPE_CHECKING:
    from .measuring import Meter

_meters: weakref.WeakKeyDictionary[Any, Meter] = weakref.WeakKeyDictionary()
"""The meters, by the torch optimizer that each one watches."""


def of(stepper: Any) -> Meter | None:
    """The meter of a torch optimizer."""
    return _meters.get(stepper)


def add(stepper: Any, meter: Meter) -> None:
    """Keep an optimizer's meter for as long as the optimizer lives."""
    _meters[stepper] = meter


def drop(stepper: Any) -> None:
    """Forget an optimizer's meter."""
    _meters.pop(stepper, None)


def count() -> int:
    """How many meters measure."""
    return sum(meter.measures for meter in _meters.values())


def metrics(optimizer: Any, prefix: str = "") -> dict[str, float]:
    """The newest shares of lost updates of an optimizer, for a framework's metrics.

    Reads nothing from a device. Empty before the first figures, and for an unwatched optimizer.

    Args:
        optimizer: a framework's, Megatron's (chained or single) or torch's, or ``None``.
        prefix: goes before the names.
    """
    if not _meters:
        return {}
    watched = (_meters.get(one) for one in _steppers(optimizer))
    return lost.metrics([one.figures for one in watched if one and one.figures], prefix)


def _steppers(optimizer: Any) -> Iterator[Any]:
    for name in ("chained_optimizers", "optimizers"):
        inside = getattr(optimizer, name, None)
        if isinstance(inside, (list, tuple)):
            for one in inside:
                yield from _steppers(one)
            return
    if hasattr(optimizer, "register_step_post_hook"):
        yield optimizer
    elif (inner := getattr(optimizer, "optimizer", None)) is not None:
        yield from _steppers(inner)
