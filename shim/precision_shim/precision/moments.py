"""Decide whether Adam's moments and step count can be stored in 16 bits.

bf16 rounds ``v <- beta2 * v + (1 - beta2) * g^2`` to 8 significant bits. If a step's relative
change ``1 - beta2`` is at most half an ulp (2^-9 to 2^-8 of ``v``), rounding restores the old
``v``, which then never decays.
"""

from __future__ import annotations

SECOND_MOMENT_LIMIT = 2.0**-8
"""``1 - beta2`` must exceed this value if the second moment is in bf16. If a decay is
smaller, rounding to bf16 restores the old value: half an ulp of bf16 is at most 2^-8 of a value."""


LAST_COUNTS = {"bf16": 256, "fp16": 2048}
"""The largest step count of each dtype: above it, adding 1 is rounded away."""


def second_moment_can_decay(beta2: float) -> bool:
    """Whether a bf16 ``exp_avg_sq`` can decay at this ``beta2``."""
    return 1.0 - beta2 > SECOND_MOMENT_LIMIT


FP16_HALF_OF_LEAST = 2.0**-25
"""Half of fp16's smallest positive number; fp16 rounds a number up to this one to zero."""


def eps_is_zero_in_fp16(eps: float) -> bool:
    """Whether fp16 rounds Adam's ``eps`` to zero.

    An ``eps`` of 0 that the user wrote does not count. If gradients are below about 5e-3, an fp16
    ``exp_avg_sq`` is zero after the first step, and the update divides by zero.
    """
    return 0.0 < eps <= FP16_HALF_OF_LEAST
