"""The lost-update meters of this process, and their shares for a framework's metrics."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from .reading import inside

METRICS = {"weights": "updates_lost", "exp_avg_sq": "updates_lost_exp_avg_sq"}
"""Maps the place where updates are lost to the name of their share in a framework's metrics."""

by_stepper: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Maps a torch optimizer to the ``updates.Meter`` that measures it."""


def metrics(optimizer: Any, prefix: str = "") -> dict[str, float]:
    """Return an optimizer's latest shares of lost updates, from no device; empty before any."""
    if not by_stepper:
        return {}
    watched = (by_stepper.get(stepper) for stepper in _steppers(optimizer))
    return shares(filter(None, watched), prefix)


def shares(watched: Iterable[Any], prefix: str = "") -> dict[str, float]:
    """Return the shares of lost updates over several meters, by their names in the metrics."""
    meters = list(watched)
    found = {metric: share(meters, name) for name, metric in METRICS.items()}
    return {f"{prefix}{metric}": one for metric, one in found.items() if one is not None}


def share(watched: Iterable[Any], name: str) -> float | None:
    """Return one share of lost updates over several meters; ``None`` if none has measured it."""
    counts = [meter.counts[name] for meter in watched if name in meter.counts]
    return sum(lost for _, lost in counts) / sum(all_ for all_, _ in counts) if counts else None


def _steppers(optimizer: Any) -> Iterator[Any]:
    several = inside(optimizer)
    if several is not None:
        for each in several:
            yield from _steppers(each)
    elif hasattr(optimizer, "register_step_post_hook"):
        yield optimizer
    elif (inner := getattr(optimizer, "optimizer", None)) is not None:
        yield from _steppers(inner)
