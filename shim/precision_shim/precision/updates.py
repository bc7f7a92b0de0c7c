"""How much of Adam's updates 16-bit weights without fp32 masters keep."""

from __future__ import annotations

import math

SIZE = 0.02
"""The usual standard deviation of a model's weights."""

_BITS = {"bf16": 8, "fp16": 11}
"""Maps a dtype to the number of its significant bits."""


def kept(lr: float, dtype: str) -> tuple[int, float]:
    """Return how many bits of an update a weight of ``SIZE`` keeps, and which share is lost whole.

    Adam's update is about as large as ``lr``. Rounding removes it from a weight if it is below half
    of the weight's last bit. For the share, the weights have a normal distribution.
    """
    bits = _BITS[dtype]
    held = math.frexp(lr)[1] - math.frexp(SIZE)[1] + bits
    least = 2.0 ** math.ceil(math.log2(lr) + bits)  # from here on, weights lose the update
    return min(max(held, 0), bits), math.erfc(least / SIZE / math.sqrt(2))


def without_masters(lr: float, dtype: str) -> tuple[str, bool]:
    """Return, in words, what weights without masters keep, and whether most updates are lost."""
    held, lost = kept(lr, dtype)
    words = (
        f"a weight in {dtype}, of the usual size {SIZE}, keeps {held} of the {_BITS[dtype]} bits "
        f"of Adam's update at lr {lr:g}, and {lost:.1%} of the updates round away whole"
    )
    return words, lost > 0.5
