"""Facts about TransformerEngine's releases; ``precision-shim doctor`` reads them without torch."""

from __future__ import annotations

import re

BF16_MOMENTS_SINCE = (2, 3)
"""The first TransformerEngine release whose FusedAdam accepts bf16 moments."""


def release(version: str) -> tuple[int, ...]:
    """Return a version's leading numbers, such as ``(2, 11, 0)`` for ``"2.11.0.dev0+cu13"``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
