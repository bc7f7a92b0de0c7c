"""Facts about TransformerEngine's releases; needs no torch, because the doctor uses them too."""

from __future__ import annotations

import re

BF16_MOMENTS_SINCE = (2, 3)
"""TransformerEngine release whose FusedAdam first takes bf16 moments."""


def release(version: str) -> tuple[int, ...]:
    """Leading numbers of a version string: ``"2.11.0.dev0+cu13"`` is ``(2, 11, 0)``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
