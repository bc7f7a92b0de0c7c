"""Compare the bytes of a checkpoint's files with the checksums in these files.

``torch.save`` writes a checksum for each of its records, but torch never compares the checksums
with the bytes. A distributed checkpoint's metadata, safetensors files, and the zip format's bytes
between records have no checksum. Changes in bytes without a checksum may go unnoticed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointUnreadableError
from ..precision.scaler_record import FILE_NAME
from .layout import Part
from .tensors import check_archive

__all__ = ["MOST", "Checked", "File", "check", "percent", "size_text"]

MOST = 256 << 20
"""Without ``--full``, maximum number of bytes whose checksums are computed, smallest file first."""

_ARCHIVES = 4096
"""Without ``--full``, maximum number of archives that are opened to compare checksums."""

_KNOWN = re.compile(
    r"\.metadata|metadata\.json|.*\.(distcp|safetensors)|model\.safetensors\.index\.json"
)
"""Matches names of files that the checkpoint doctor reads, except ``*.pt`` files."""

_NAMED = 4
"""Maximum number of file names in a line of text."""

Span = tuple[int, int]


@dataclass(frozen=True)
class File:
    """A file of a checkpoint.

    Attributes:
        path: the file.
        size: the file's size in bytes.
        held: the spans of bytes whose checksum is correct.
        unread: the spans of bytes for which no checksum was computed.
        ours: whether the checkpoint doctor reads files of this kind.
    """

    path: Path
    size: int
    held: tuple[Span, ...] = ()
    unread: tuple[Span, ...] = ()
    ours: bool = True

    def bytes(self, state: str) -> int:
        """Return the number of bytes with ``state``: ``"checked"`` or a key of ``_SAID``."""
        held, unread = (sum(b - a for a, b in spans) for spans in (self.held, self.unread))
        if not self.ours:
            return self.size if state == "not_looked_at" else 0
        rest = self.size - held - unread
        return {"checked": held, "not_read": unread, "no_checksum": rest}.get(state, 0)

    def is_checked(self, place: int) -> bool:
        """Whether the byte at a position is covered by a correct checksum."""
        return any(start <= place < end for start, end in self.held)


_SAID = {
    "not_read": "not read",
    "no_checksum": "no checksum",
    "not_looked_at": "other files",
}
_MEANS = {
    "not_read": "but for a sample of the values; --full reads them",
    "no_checksum": "a change there may go unnoticed",
    "not_looked_at": "not looked at",
}


@dataclass(frozen=True)
class Checked:
    """The files of a model's checkpoint, and which of their bytes were checked.

    Attributes:
        top: the model's directory.
        files: the files in the directory.
    """

    top: Path
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Size of all files, in bytes."""
        return sum(file.size for file in self.files)

    def bytes(self, state: str) -> int:
        """Return the number of bytes that ``state`` describes in all files; see ``File.bytes``."""
        return sum(file.bytes(state) for file in self.files)

    def share(self, state: str) -> float:
        """Return ``bytes(state)`` divided by the size of all files."""
        return self.bytes(state) / max(1, self.size)

    def name(self, file: File) -> str:
        """Return a file's name within the model's directory."""
        return os.path.relpath(file.path, self.top)

    def _in(self, state: str) -> list[File]:
        files = [file for file in self.files if file.bytes(state)]
        return sorted(files, key=lambda file: (-file.bytes(state), file.path))

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the report's rows on checked bytes, each a label and a sentence."""
        held = self.bytes("checked")
        yield (
            "checked",
            f"{size_text(held)} of {size_text(self.size)} in {_files(self.files)} hold their "
            f"checksums ({percent(self.share('checked'))})",
        )
        for state, said in _SAID.items():
            files = self._in(state)
            if files:
                names = ", ".join(self.name(file) for file in files[:_NAMED])
                more = f", and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
                yield (
                    said,
                    f"{size_text(self.bytes(state))} in {_files(files)} "
                    f"({percent(self.share(state))}): {names}{more}: {_MEANS[state]}",
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the number of bytes by state, in total and by file, in a form for JSON."""
        told: dict[str, Any] = {"count": len(self.files), "bytes": self.size}
        for state in ("checked", *_SAID):
            told[state] = {
                "bytes": self.bytes(state),
                "share": self.share(state),
                "files": {self.name(file): file.bytes(state) for file in self._in(state)},
            }
        return told


def check(part: Part, most: int | None = MOST) -> Checked:
    """Compare a model's files with the checksums in these files.

    Args:
        part: the model.
        most: maximum number of bytes whose checksums are computed; ``None`` for all.

    Raises:
        CheckpointUnreadableError: a file is damaged; the message names the first damaged file.
    """
    archives: dict[Path, list[tuple[int, int | None]]] = {}
    units = [*part.units, *part.weights]
    for unit in units:
        for path, offset, length in unit.archives:
            archives.setdefault(path, []).append((offset, length))
    sizes = {path: path.stat().st_size for path in _paths(part)}
    folders = {unit.path for unit in units}
    left, count = most, 0
    found, damaged = [], []
    for path in sorted(sizes, key=lambda size: (sizes[size], size)):
        held: list[Span] = []
        unread: list[Span] = []
        for offset, length in sorted(archives.get(path, ()), key=lambda span: span[0]):
            end = sizes[path] if length is None else offset + length
            count += 1
            if left is not None and (end - offset > left or count > _ARCHIVES):
                unread.append((offset, end))
                continue
            left = None if left is None else left - (end - offset)
            try:
                held += check_archive(path, offset, length)
            except CheckpointUnreadableError as error:
                damaged.append(str(error).rstrip("."))
                break
        if path.name == FILE_NAME and part.scaler.where == str(path):
            held = [(0, sizes[path])] if part.scaler.state == "whole" else []
        known = path.parent in folders and _KNOWN.fullmatch(path.name)
        ours = path in archives or bool(known) or path.name == FILE_NAME
        found.append(File(path, sizes[path], _merge(held), _merge(unread), ours))
    if damaged:
        others = f"{len(damaged) - 1} more " + ("file is" if len(damaged) == 2 else "files are")
        more = f"; {others} damaged" if damaged[1:] else ""
        raise CheckpointUnreadableError(f"{damaged[0]}{more}.")
    return Checked(part.path, tuple(found))


def _paths(part: Part) -> list[Path]:
    """Return all files in a model's directories; a directory may be a symbolic link."""
    tops = [part.path, *(unit.path for unit in (*part.units, *part.weights))]
    paths = {
        Path(folder, name) for top in tops for folder, _, names in os.walk(top) for name in names
    }
    return sorted(path for path in paths if path.is_file())


def _merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Merge overlapping spans: a zip file's damaged central directory may list some bytes twice."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    return tuple(merged)


def _files(files: Iterable[File]) -> str:
    count = len(tuple(files))
    return f"{count} file" + ("s" if count != 1 else "")


def percent(share: float) -> str:
    """Return a share as text; only exactly 1 is ``"100.0%"`` and only exactly 0 is ``"0.0%"``."""
    text = f"{100 * share:.1f}%"
    if 0 < share < 1 and text in ("0.0%", "100.0%"):
        return "under 0.1%" if text == "0.0%" else "over 99.9%"
    return text


def size_text(count: int) -> str:
    """Return a number of bytes as text, such as ``"1.5 GiB"``."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
