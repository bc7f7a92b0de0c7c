"""Read the version that a package's source states, without executing the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import decode_source
from pathlib import Path
from typing import Protocol

_VERSION_FILES = ("__init__.py", "_version.py", "version.py", "package_info.py")
_PARTS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")


class SourceFiles(Protocol):
    """The files below one root; paths are relative to this root and have slashes."""

    def is_file(self, path: str) -> bool:
        """Whether the path is a file."""

    def is_folder(self, path: str) -> bool:
        """Whether the path is a folder."""

    def top(self) -> list[str]:
        """Return the names directly below the root."""

    def read(self, path: str) -> bytes:
        """Return a file's content."""


class Folder:
    """The ``Files`` below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def is_file(self, path: str) -> bool:
        """See ``Files``."""
        return (self.root / path).is_file()

    def is_folder(self, path: str) -> bool:
        """See ``Files``."""
        return (self.root / path).is_dir()

    def top(self) -> list[str]:
        """See ``Files``."""
        return sorted(path.name for path in self.root.iterdir())

    def read(self, path: str) -> bytes:
        """See ``Files``."""
        return (self.root / path).read_bytes()


def stated_version(distribution: str, package: str, folder: Path) -> str | None:
    """Return the version that a package's source states, or ``None``; the source is not executed.

    Args:
        distribution: the package's distribution.
        package: the package's name.
        folder: the package's folder.
    """
    root = folder.parents[package.count(".")]
    try:
        return next(find_written(Folder(root), distribution, package), None)
    except OSError:
        return None


def find_written(files: SourceFiles, distribution: str, package: str) -> Iterator[str]:
    """Yield the versions that a package's files state, the most specific file first."""
    base = package.replace(".", "/")
    for file in (f"{base}/version/version", f"{base}/VERSION", f"{base}/version.txt"):
        if files.is_file(file):
            yield files.read(file).decode("utf-8", "replace").strip()
    for name in _VERSION_FILES:
        if files.is_file(f"{base}/{name}"):
            try:
                yield from _find_assigned(ast.parse(decode_source(files.read(f"{base}/{name}"))))
            except (SyntaxError, ValueError):
                continue
    for folder in ("", "../"):
        if files.is_file(f"{folder}pyproject.toml"):
            text = files.read(f"{folder}pyproject.toml").decode("utf-8", "replace")
            yield from _find_declared(text, distribution, files, folder)


def _find_declared(text: str, distribution: str, files: SourceFiles, folder: str) -> Iterator[str]:
    """Yield the version in a distribution's ``pyproject.toml``, or in the file that it names."""

    def written(section: str, key: str) -> str:
        pattern = rf"^\[{section}\]\s*$(.*?)(^\[|\Z)"
        match = re.search(pattern, text, re.MULTILINE | re.DOTALL)
        value = match and re.search(rf"^{key} *[\"']([^\"']+)", match[1], re.MULTILINE)
        return value[1] if value else ""

    if normal(written("project", "name *=")) != normal(distribution):
        return
    version = written("project", "version *=")
    if version:
        yield version
    file = written(r"tool\.setuptools\.dynamic", r"version *= *\{ *file *= *\[?")
    if file and files.is_file(folder + file):
        yield files.read(folder + file).decode("utf-8", "replace").strip()


def _find_assigned(tree: ast.Module) -> Iterator[str]:
    """Yield the version in a module's ``__version__``, or in NVIDIA's ``MAJOR``, ``MINOR`` etc."""
    values = {
        target.id: line.value.value
        for line in tree.body
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant)
        for target in line.targets
        if isinstance(target, ast.Name)
    }
    if isinstance(values.get("__version__"), str):
        yield str(values["__version__"])
    elif all(isinstance(values.get(name), int) for name in _PARTS[:3]):
        yield ".".join(str(values[name]) for name in _PARTS[:3]) + str(values.get(_PARTS[3], ""))


def normal(name: str) -> str:
    """Return a distribution's name in the form of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()
