"""The lost-update meters of this process, and how optimizers' weights reach rollout engines."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import lost

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rollout:
    """How the weights that an optimizer updates reach the rollout engine.

    Attributes:
        dtypes: the dtypes that each weight is rounded to: the transfer's dtype, then the engine's.
            ``dtypes`` is empty if a dtype is unknown or, like fp8, cannot be measured.
        merged: whether LoRA's factors are merged into the weights that the engine receives.
    """

    dtypes: tuple[torch.dtype, ...]
    merged: bool = False


_meters: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Maps a torch optimizer to the ``measuring.Meter`` that measures it."""

_rollouts: weakref.WeakKeyDictionary[Any, Rollout] = weakref.WeakKeyDictionary()
"""Maps a torch optimizer, with or without a meter, to its ``Rollout``."""


def of(stepper: Any) -> Any:
    """Return the ``measuring.Meter`` of a torch optimizer, or ``None``."""
    return _meters.get(stepper)


def add(stepper: Any, meter: Any) -> None:
    """Register an optimizer's meter, for as long as the optimizer exists."""
    _meters[stepper] = meter


def drop(stepper: Any) -> None:
    """Remove an optimizer's meter from the register."""
    _meters.pop(stepper, None)


def tell_rollout(optimizer: Any, rollout: Rollout) -> None:
    """Record how an optimizer's weights reach the rollout engine; a later call replaces the record.

    Args:
        optimizer: see ``metrics``.
        rollout: how the weights reach the engine.
    """
    for stepper in _steppers(optimizer):
        _rollouts[stepper] = rollout


def rollout_of(stepper: Any) -> Rollout | None:
    """Return how a torch optimizer's weights reach the rollout engine; ``None`` if not recorded."""
    return _rollouts.get(stepper)


def count() -> int:
    """Return the number of meters that still measure."""
    return sum(meter.measures for meter in _meters.values())


def metrics(optimizer: Any, prefix: str = "") -> dict[str, float]:
    """Return the latest shares of an optimizer's lost updates, for a framework's metrics.

    The function reads nothing from a device. The result is empty before the first measurement.

    Args:
        optimizer: a framework's, Megatron's (chained or single) or torch's optimizer, or ``None``.
        prefix: prefix of the metrics' names.
    """
    if not _meters:
        return {}
    watched = (_meters.get(stepper) for stepper in _steppers(optimizer))
    return lost.metrics([watch.figures for watch in watched if watch and watch.figures], prefix)


def _steppers(optimizer: Any) -> Iterator[Any]:
    for name in ("chained_optimizers", "optimizers", ""):
        inside = getattr(optimizer, name, None) if name else optimizer
        if isinstance(inside, (list, tuple)):
            for each in inside:
                yield from _steppers(each)
            return
    if hasattr(optimizer, "register_step_post_hook"):
        yield optimizer
    elif (inner := getattr(optimizer, "optimizer", None)) is not None:
        yield from _steppers(inner)
