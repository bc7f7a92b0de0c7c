"""The lost-update meters of this process, and the dtypes of the rollout engines' copies of weights.

This module does not import ``updates``, because a worker imports the meter only to measure.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..precision.dtypes import name_of
from .reading import inside

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes in which copies of weights can be measured, the coarsest first."""


@dataclass(frozen=True)
class Rollout:
    """The rollout engine's copies of the weights that an optimizer updates.

    Attributes:
        dtype: the coarsest dtype on a weight's way into the engine; ``None`` if not measurable.
        factors: whether LoRA's factors themselves are sent, and not only merged weights.
    """

    dtype: torch.dtype | None
    factors: bool = False


by_stepper: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Maps a torch optimizer to the ``updates.measuring.Meter`` that measures it."""

rollouts: weakref.WeakKeyDictionary[Any, Rollout] = weakref.WeakKeyDictionary()
"""Maps a torch optimizer, with or without a meter, to its ``Rollout``."""


def of(stepper: Any) -> Any:
    """Return the meter of a torch optimizer, or ``None``."""
    return by_stepper.get(stepper)


def tell_rollout(optimizer: Any, *names: str, factors: bool = False) -> None:
    """Record the dtypes of the rollout's copies of an optimizer's weights.

    ``names``: canonical names of all dtypes that a weight is rounded to, the engine's own included.
    """
    known = {name_of(dtype): dtype for dtype in DTYPES}
    coarsest = next((known[name] for name in known if name in names), None)
    dtype = coarsest if known.keys() >= set(names) else None
    for stepper in _steppers(optimizer):
        rollouts[stepper] = Rollout(dtype, factors)


def metrics(optimizer: Any, prefix: str = "") -> dict[str, float]:
    """Return an optimizer's latest shares of lost updates, from no device; empty before any."""
    if not by_stepper:
        return {}
    from precision_shim_tools.updates import lost

    watched = (by_stepper.get(stepper) for stepper in _steppers(optimizer))
    return lost.metrics([watch.figures for watch in watched if watch and watch.figures], prefix)


def _steppers(optimizer: Any) -> Iterator[Any]:
    several = inside(optimizer)
    if several is not None:
        for each in several:
            yield from _steppers(each)
    elif hasattr(optimizer, "register_step_post_hook"):
        yield optimizer
    elif (inner := getattr(optimizer, "optimizer", None)) is not None:
        yield from _steppers(inner)
