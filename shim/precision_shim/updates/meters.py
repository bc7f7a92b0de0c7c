"""The lost-update meters of this process, what they know of rollouts, and what they measured."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import lost

if TYPE_CHECKING:
    import torch

    from .measuring import Meter


@dataclass(frozen=True)
class Rollout:
    """How the weights that an optimizer steps reach the rollout engine.

    Attributes:
        dtypes: what each weight is rounded to, in order: what carries it, then what the engine
            keeps it in; empty where that is not known or is no dtype, such as fp8.
        merged: whether LoRA's factors reach the engine only within the weights that they change.
    """

    dtypes: tuple[torch.dtype, ...]
    merged: bool = False


_meters: weakref.WeakKeyDictionary[Any, Meter] = weakref.WeakKeyDictionary()
"""The meters, by the torch optimizer that each one watches."""

_rollouts: weakref.WeakKeyDictionary[Any, Rollout] = weakref.WeakKeyDictionary()
"""The rollouts of torch optimizers, whether or not a meter watches them."""


def of(stepper: Any) -> Meter | None:
    """The meter of a torch optimizer."""
    return _meters.get(stepper)


def add(stepper: Any, meter: Meter) -> None:
    """Keep an optimizer's meter for as long as the optimizer lives."""
    _meters[stepper] = meter


def drop(stepper: Any) -> None:
    """Forget an optimizer's meter."""
    _meters.pop(stepper, None)


def tell_rollout(optimizer: Any, rollout: Rollout) -> None:
    """Note how an optimizer's weights reach the rollout engine; the newest word counts.

    Args:
        optimizer: see ``metrics``.
        rollout: how they do.
    """
    for stepper in _steppers(optimizer):
        _rollouts[stepper] = rollout


def rollout_of(stepper: Any) -> Rollout | None:
    """How a torch optimizer's weights reach the rollout engine; ``None`` if nobody said."""
    return _rollouts.get(stepper)


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
    watched = (_meters.get(stepper) for stepper in _steppers(optimizer))
    return lost.metrics([watch.figures for watch in watched if watch and watch.figures], prefix)


def _steppers(optimizer: Any) -> Iterator[Any]:
    for name in ("chained_optimizers", "optimizers", ""):
        inside = getattr(optimizer, name, None) if name else optimizer
        if isinstance(inside, (list, tuple)):
            for one in inside:
                yield from _steppers(one)
            return
    if hasattr(optimizer, "register_step_post_hook"):
        yield optimizer
    elif (inner := getattr(optimizer, "optimizer", None)) is not None:
        yield from _steppers(inner)
