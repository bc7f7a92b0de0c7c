"""Write and read audits as JSON files, one file for each rank and optimizer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ..files.writing import write_whole
from .record import Audit

T = TypeVar("T")

SUFFIX = ".audit.json"


def stem(audit: Audit) -> str:
    """Return the beginning of an audit's file name, such as ``"verl.actor.dense+experts"``."""
    names = "+".join(part.name for part in audit.parts)
    words = (audit.framework, audit.subject or "optimizer", names)
    return ".".join(re.sub(r"[^\w+-]+", "-", word) for word in words)


def write(directory: str | os.PathLike[str], stem: str, audit: Audit) -> Path:
    """Write an audit into ``directory``, which is created; the file is replaced atomically.

    Raises:
        OSError: the file cannot be written; no temporary file is left.
    """
    path = Path(directory) / f"{stem}.rank{audit.rank}{SUFFIX}"
    write_whole(path, json.dumps(audit.to_dict(), indent=1) + "\n")
    return path


def not_written(directory: str | os.PathLike[str], error: OSError) -> str:
    """Return the warning that audits are not written; its text names no optimizer and no step."""
    # str(error) would contain the temporary file's name, which differs each time.
    return (
        f"PRECISION_SHIM_AUDIT_DIR={directory}: the audit was not written: "
        f"{error.strerror or error}. Set PRECISION_SHIM_AUDIT_DIR to a directory that every rank "
        "may write to, or unset it. status() has the audit all the same."
    )


def number(path: Path, audit: Audit) -> str:
    """Return the number that ``latest.name`` appended to a file's name, or an empty string."""
    name = path.name.removesuffix(f".rank{audit.rank}{SUFFIX}")
    return name.removeprefix(stem(audit)).removeprefix("-")


def read_audits(directory: str | os.PathLike[str]) -> Iterator[tuple[Path, Audit | str]]:
    """Read the audits in a directory; see ``read_files``."""
    return read_files(directory, SUFFIX, Audit.from_dict)


def read_files(
    directory: str | os.PathLike[str], suffix: str, make: Callable[[Any], T]
) -> Iterator[tuple[Path, T | str]]:
    """Read a directory's JSON files in order of their names; yield an error for an invalid file.

    ``make`` converts a parsed file whose name ends with ``suffix`` into a record.

    Raises:
        OSError: the directory cannot be read.
    """
    for path in sorted(Path(directory).iterdir()):
        if not path.name.endswith(suffix):
            continue
        try:
            record: T | str = make(json.loads(path.read_text(encoding="utf-8")))
        except Exception as error:  # the other files are compared all the same
            record = f"{type(error).__name__}: {error}"
        yield path, record
