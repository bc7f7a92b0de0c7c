"""The header of a safetensors file, without a weight and without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["read_header"]

_LARGEST = 100_000_000


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """What a file says of its tensors, by name, and where in the file their bytes begin.

    A header may have 100 MB, as in the format's own reader, which opens no file with a larger one;
    so a damaged length cannot ask for more memory than that.

    Raises:
        OSError: it cannot be read.
        ValueError: it has no whole header.
        AttributeError, RecursionError: its header is JSON of something else.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LARGEST):
            raise ValueError("its header is not whole")
        entries = json.loads(file.read(length))
    return {name: one for name, one in entries.items() if name != "__metadata__"}, 8 + length
