"""The states of a directory that remain if a process is killed at one of its file operations.

Before each operation in the directory, the directory's files are copied. A kill before an operation
leaves the same files, because data that the process has not yet passed to the system is lost. A
single save thus yields the states at all its file operations. ``killed_at`` really kills a process
at one operation, so that a test can compare the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Hook:
    """Calls a function before each file operation below a directory, in this process."""

    def __init__(self) -> None:
        self.directory = ""
        self.call: Callable[[], None] | None = None
        self._busy = False
        self._added = False
        self._process = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.call is None or self._busy:
            return
        if event == "open":
            path, _, flags = arguments
            changes = isinstance(flags, int) and bool(flags & _WRITING)
        else:
            path, changes = arguments[0] if arguments else None, event in _CHANGES
        if changes and isinstance(path, (str, bytes, os.PathLike)) and self._below(path):
            self.point()

    def point(self) -> None:
        """Call the function, because a file operation is about to happen."""
        # Megatron-core up to 0.16 forks processes that write; only this process makes the copies.
        if self.call is None or self._busy or os.getpid() != self._process:
            return
        self._busy = True
        try:
            self.call()
        finally:
            self._busy = False

    def _below(self, path: Any) -> bool:
        whole = os.path.abspath(os.fsdecode(path))
        return whole == self.directory or whole.startswith(self.directory + os.sep)

    @contextlib.contextmanager
    def watching(self, directory: Path, call: Callable[[], None]) -> Iterator[None]:
        if not self._added:  # a process cannot remove an audit hook; a rank is one of many forks
            sys.addaudithook(self)
            self._added = True
        self.directory, self.call = os.path.abspath(directory), call
        self._process = os.getpid()
        try:
            with _torch_saves_by_python(self):
                yield
        finally:
            self.call = None


_EVERY = 8
"""Each so many writes into a file count as one file operation: a file is as unreadable after the
next as after this one, until its end is there, and the next operation is another file's."""


class _Watched(io.FileIO):
    """An unbuffered file, whose writes count as file operations."""

    hook: _Hook
    writes = 0

    def write(self, data: Any) -> int:
        if self.writes % _EVERY == 0:
            self.hook.point()
        self.writes += 1
        return super().write(data)


@contextlib.contextmanager
def _torch_saves_by_python(hook: _Hook) -> Iterator[None]:
    """Give torch.save an open file, because nothing here notices writes of its C++ code."""
    import torch

    save = torch.save

    def watched(obj: Any, f: Any, *arguments: Any, **named: Any) -> None:
        if not isinstance(f, (str, os.PathLike)):
            return save(obj, f, *arguments, **named)
        with _Watched(f, "wb") as file:
            file.hook = hook
            return save(obj, file, *arguments, **named)

    torch.save = watched
    try:
        yield
    finally:
        torch.save = save


_HOOK = _Hook()


@contextlib.contextmanager
def kill_points(directory: Path, copies: Path, rank: int = 0) -> Iterator[list[Path]]:
    """Copy a directory before each file operation in it, and once more at the end.

    Yields:
        The list of copies, which grows during the block; successive copies always differ.
    """
    found: list[Path] = []
    last = [""]

    def copy() -> None:
        place = copies / f"{len(found):05d}-{rank}"
        _copy(directory, place)
        seen = content_of(place)
        if seen == last[0]:
            shutil.rmtree(place)
            return
        last[0] = seen
        found.append(place)

    copies.mkdir(parents=True, exist_ok=True)
    with _HOOK.watching(directory, copy):
        yield found
    copy()


@contextlib.contextmanager
def killed_at(directory: Path, content: str) -> Iterator[None]:
    """Kill this process before the first operation at which the directory has this content."""

    def kill() -> None:
        if content_of(directory) == content:
            os.kill(os.getpid(), signal.SIGKILL)

    with _HOOK.watching(directory, kill):
        yield


def beside_another_job(target: Path, other: Path, save: Callable[[], None]) -> Iterator[Path]:
    """Save into an empty directory again and again; before one file operation another job's save
    ends there: before the first, then before the second, and so on.

    Yields:
        The directory after each save, under another name: the shim warns once of each path.
    """
    shutil.rmtree(target, ignore_errors=True)
    for number in itertools.count():
        target.mkdir()
        left = [number]

        def lands(left: list[int] = left) -> None:
            if left[0] == 0:
                shutil.copytree(other, target, dirs_exist_ok=True, copy_function=shutil.copyfile)
            left[0] -= 1

        with _HOOK.watching(target, lands):
            save()
        if left[0] >= 0:
            return
        yield target.rename(target.with_name(f"{target.name}-{number}"))


def content_of(directory: Path) -> str:
    """A digest of the names and contents of a directory's files.

    All temporary files count as one name, because each process names them differently, and so do
    all directories in which a save is written. Nothing reads either: only their names count.
    """
    digest = hashlib.sha256()
    lines = []
    for path in sorted(directory.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # of another rank
            if path.is_file():
                name = re.sub(r"_shim_\w{32}/", "/", path.relative_to(directory).as_posix())
                hidden = path.name.startswith(".precision_shim_scaler.json.")
                name = "temporary" if hidden else name
                read = b"" if name != path.relative_to(directory).as_posix() else path.read_bytes()
                lines.append(f"{name} {hashlib.sha256(read).hexdigest()}")
    digest.update("\n".join(sorted(lines)).encode())
    return digest.hexdigest()


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(source.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # of another rank
            place = target / path.relative_to(source)
            if path.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)
