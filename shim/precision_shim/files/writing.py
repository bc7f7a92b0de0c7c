"""Write a file so that it is whole or absent, whatever happens to the process or the disk."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text into a new file, flush it, and only then give it its name.

    The directory is created if it does not exist; an existing file is replaced.

    Raises:
        OSError: the file cannot be written; no temporary file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each writer has another temporary name, so that two simultaneous saves leave a complete file.
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with part.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every file system can flush a directory
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
