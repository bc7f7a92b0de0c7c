"""Read the header of a safetensors file, without reading weights and without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LARGEST = 100_000_000


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of a file's header, by tensor name, and the offset of the file's data.

    A header may have at most 100 MB, so that a damaged length cannot use up the memory.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has no complete header.
        AttributeError, RecursionError: the header's JSON is not an object of entries.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LARGEST):
            raise ValueError("its header is not whole")
        entries = json.loads(file.read(length))
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}, 8 + length
