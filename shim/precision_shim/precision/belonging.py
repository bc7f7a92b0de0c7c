"""Which save a loss scaler's record belongs to: told by the files that were written with it.

A fingerprint is made of what a file holds and of nothing else (no times, no inode, no path), so
that a copy on another file system has the same. Nothing is unpickled, and no file is read whole
that is larger than some hundred kilobytes. Needs no torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import BinaryIO

_BLOCK = 1 << 14
"""Bytes that are read at each place of a file that is looked at."""
_PLACES = 16
"""Such places in a file, its beginning and its end among them."""

_BOUND = re.compile(r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt|.*\.distcp|\.metadata")
_FINGERPRINT = re.compile(r"\d{1,19}:[0-9a-f]{16}")


def fingerprint(path: str | os.PathLike[str]) -> str:
    """What tells a file from others by its content.

    Covered are its size; 16 KiB at sixteen places, from its beginning to its end; and where it is a
    zip file, as ``torch.save`` writes them, the names, sizes and CRC-32 of all members, from the
    zip's directory: so every byte of such a file.

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


def fingerprints(files: Mapping[str, str | os.PathLike[str]]) -> dict[str, str]:
    """The fingerprints of those files that are there.

    Args:
        files: by the names that a record has for them, where they lie.

    Raises:
        OSError: a file is there and cannot be read.
    """
    return {name: fingerprint(place) for name, place in files.items() if os.path.isfile(place)}


def files_beneath(directory: str | os.PathLike[str]) -> dict[str, str]:
    """The files that a record in a directory may be bound to, by their names relative to it.

    They are the ranks' own ones, and those of torch's distributed checkpoint, in the directory and
    in those that lie in it.
    """
    found = {}
    for entry in sorted(os.scandir(directory), key=lambda one: one.name):
        inside = sorted(os.scandir(entry), key=lambda one: one.name) if entry.is_dir() else [entry]
        for one in inside:
            if _BOUND.fullmatch(one.name) and one.is_file():
                found[os.path.relpath(one.path, directory).replace(os.sep, "/")] = one.path
    return found


def foreign(bound: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """The files that prove a record to be of another save: those of another content, or new ones.

    A file that is not there any more proves nothing: weights are copied without states, and states
    are removed.

    Args:
        bound: the fingerprints in the record.
        found: those of the files that are there.
    """
    return sorted(name for name, one in found.items() if bound.get(name) != one)


def are_fingerprints(value: object) -> bool:
    """Whether a record's value can be fingerprints by names of files."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(one, str) and _FINGERPRINT.fullmatch(one)
        for name, one in value.items()
    )


def _places(size: int) -> Iterator[int]:
    """Where to read; of a small file, all of it."""
    if size <= _BLOCK * _PLACES:
        yield from range(0, size, _BLOCK)
        return
    for number in range(_PLACES):
        yield (size - _BLOCK) * number // (_PLACES - 1)


def _members(file: BinaryIO) -> Iterator[str]:
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except Exception:  # whatever a file that is no zip, or a damaged one, makes of zipfile
        return
    for one in members:
        yield f"{one.filename}\0{one.file_size}\0{one.CRC}\n"
