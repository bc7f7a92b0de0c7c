"""The dtype names that the FSDP engines of both verl and SkyRL accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from precision_shim.errors import DtypeError

_NAMES: Mapping[torch.dtype, tuple[str, ...]] = {
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float16: ("fp16", "float16", "16"),
    torch.float32: ("fp32", "float32", "32"),
}
"""Maps a dtype to its names in ``PrecisionType.to_dtype``, which accepts no other names."""

_BY_NAME = {name: dtype for dtype, names in _NAMES.items() for name in names}


def own_dtype(value: Any, key: str, where: str) -> torch.dtype:
    """Convert a value in the config of verl's or SkyRL's FSDP engine to a dtype.

    ``value`` is a dtype, a name, or the number 16 or 32; ``where`` is framework and version.

    Raises:
        DtypeError: the engine does not accept the name; the error names the config's ``key``.
    """
    if isinstance(value, torch.dtype) and value in _NAMES:
        return value
    name = str(value) if isinstance(value, int | str) and value is not True else ""
    if name in _BY_NAME:
        return _BY_NAME[name]
    allowed = ", ".join("/".join(names) for names in _NAMES.values())
    raise DtypeError(
        f"{where}: {key}={value!r} names no dtype that its FSDP engine takes; allowed: {allowed}, "
        f"spelled so. Correct {key}.",
        key=key,
    )
