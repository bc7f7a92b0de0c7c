"""Which save a loss scaler's record belongs to, by fingerprints of the files written with it.

A fingerprint depends on a file's content alone (no times, no inode, no path), so that a copy on
another file system has the same fingerprint. The module unpickles nothing, and reads no file whole
that is larger than 256 KiB. Needs no torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import BinaryIO

_BLOCK = 1 << 14
"""Bytes to read at each place."""
_PLACES = 16
"""Places to read in a large file, from its beginning to its end."""

_BOUND = re.compile(r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt|.*\.distcp|\.metadata")
_FINGERPRINT = re.compile(r"\d{1,19}:[0-9a-f]{16}")


def fingerprint(path: str | os.PathLike[str]) -> str:
    """A file's size and a digest of its content, as text.

    The digest covers 16 KiB at sixteen places, from the beginning to the end. For a zip file, such
    as ``torch.save`` writes, it also covers the names, sizes and CRC-32 of all members, as the
    zip's directory has them, and so every byte of the members.

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
    """The fingerprints of those files that exist.

    Args:
        files: name in a record to path.

    Raises:
        OSError: a file exists and cannot be read.
    """
    return {name: fingerprint(place) for name, place in files.items() if os.path.isfile(place)}


def files_beneath(directory: str | os.PathLike[str]) -> dict[str, str]:
    """The files beneath a directory that a record in it may name, by their relative paths.

    These are the ranks' own files and the files of torch's distributed checkpoint, in the directory
    and its direct subdirectories.
    """
    files = {}
    for entry in sorted(os.scandir(directory), key=lambda item: item.name):
        inside = (
            sorted(os.scandir(entry), key=lambda item: item.name) if entry.is_dir() else [entry]
        )
        for file in inside:
            if _BOUND.fullmatch(file.name) and file.is_file():
                files[os.path.relpath(file.path, directory).replace(os.sep, "/")] = file.path
    return files


def foreign(bound: Mapping[str, str], prints: Mapping[str, str]) -> list[str]:
    """The files that prove a record to be of another save: changed files, and unrecorded ones.

    A missing file proves nothing: users copy weights without optimizer states, and delete states.

    Args:
        bound: the fingerprints in the record.
        prints: the fingerprints of the files that exist.
    """
    return sorted(name for name, print_ in prints.items() if bound.get(name) != print_)


def are_fingerprints(value: object) -> bool:
    """Whether a record's value has the form of ``fingerprints``: file name to fingerprint."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(text, str) and _FINGERPRINT.fullmatch(text)
        for name, text in value.items()
    )


def _places(size: int) -> Iterator[int]:
    """Offsets at which to read; in a small file, they cover all of it."""
    if size <= _BLOCK * _PLACES:
        yield from range(0, size, _BLOCK)
        return
    for number in range(_PLACES):
        yield (size - _BLOCK) * number // (_PLACES - 1)


def _members(file: BinaryIO) -> Iterator[str]:
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except Exception:  # zipfile may raise anything for a damaged file or no zip
        return
    for member in members:
        yield f"{member.filename}\0{member.file_size}\0{member.CRC}\n"
