"""Check whether a loss scaler's saved state and a checkpoint's files are from the same save.

A file's fingerprint depends only on its content, not on times, inode or path. The module unpickles
nothing, does not read all of a file above 256 KiB, and needs no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import BinaryIO

Files = Mapping[str, "str | os.PathLike[str]"]
"""Maps a file's name in a checkpoint to the path of this rank's file."""

_BLOCK = 1 << 14
"""Number of bytes in each block that is read."""
_PLACES = 16
"""Number of blocks that are read of a large file, spread from its beginning to its end."""

_BOUND = re.compile(
    r"(?s).*/((model|optim|extra_state)_world_size_\d+_rank_\d+\.pt|[\w.-]*\.distcp|\.metadata"
    r"|(?<=/model/)[\w.-]*\.safetensors)"
)
_FINGERPRINT = re.compile(r"\d{1,19}:[0-9a-f]{16}")


def fingerprint(path: str | os.PathLike[str]) -> str:
    """Return a file's size and a digest of its content, as text.

    The digest covers 16 KiB at sixteen places, and for a zip file (``torch.save``) the names, sizes
    and CRC-32 of all members, and so every byte of them.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256()
        for start in _places(size):
            file.seek(start)
            digest.update(file.read(_BLOCK))
        for member in _members(file):
            digest.update(member.encode(errors="surrogateescape"))
    return f"{size}:{digest.hexdigest()[:16]}"


def fingerprints(files: Files) -> dict[str, str]:
    """Return the fingerprint of each file that exists, under the same key as in ``files``.

    Raises:
        OSError: an existing file cannot be read.
    """
    return {name: fingerprint(place) for name, place in files.items() if os.path.isfile(place)}


def files_beneath(directory: str | os.PathLike[str], prefix: str = "") -> dict[str, str]:
    """Map names in a record to paths, for files in a directory and its direct subdirectories.

    ``prefix`` is the directory's path relative to the record's, such as ``"../weights/"``. The
    result is empty if the directory does not exist.
    """
    top, files = os.path.abspath(directory), {}
    for place in (top, *sorted(entry.path for entry in _scan(top) if entry.is_dir())):
        for entry in sorted(_scan(place), key=lambda item: item.name):
            if _BOUND.fullmatch(entry.path.replace(os.sep, "/")) and entry.is_file():
                files[prefix + os.path.relpath(entry.path, top).replace(os.sep, "/")] = entry.path
    return files


def _scan(directory: str) -> list[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        return list(entries)
    return []


def foreign(bound: Mapping[str, str], prints: Mapping[str, str]) -> list[str]:
    """Return the names of files of another save: the record lacks them or has other fingerprints.

    ``bound`` are the fingerprints in the record, ``prints`` those of the files that exist. Users
    may delete optimizer states, so a deleted file is not returned. A file that the record lacks
    counts only in a directory of which the record names files, and if a load would read it: of
    ``*.distcp`` a load reads those that ``.metadata`` names, which the record names, too.
    """
    places = {posixpath.dirname(name) for name in bound}
    return sorted(
        name
        for name, print_ in prints.items()
        if bound.get(name) != print_
        and (name in bound or (posixpath.dirname(name) in places and ".distcp" not in name))
    )


def are_fingerprints(value: object) -> bool:
    """Whether a record's value has the form that ``fingerprints`` returns."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(text, str) and _FINGERPRINT.fullmatch(text)
        for name, text in value.items()
    )


def _places(size: int) -> Iterator[int]:
    """Yield the offsets of the blocks to read; the blocks of a small file cover the whole file."""
    if size <= _BLOCK * _PLACES:
        yield from range(0, size, _BLOCK)
        return
    for number in range(_PLACES):
        yield (size - _BLOCK) * number // (_PLACES - 1)


def _members(file: BinaryIO) -> Iterator[str]:
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except Exception:  # zipfile may raise any error if the file is damaged or not a zip file
        return
    for member in members:
        yield f"{member.filename}\0{member.file_size}\0{member.CRC}\n"
