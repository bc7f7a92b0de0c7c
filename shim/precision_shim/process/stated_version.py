"""Read the version that a package's source states, without executing the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import decode_source
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zipfile

    Root = Path | zipfile.Path

_VERSION_FILES = ("__init__.py", "_version.py", "version.py", "package_info.py")
_PARTS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")


def stated_version(distribution: str, package: str, folder: Path) -> str | None:
    """Return the version that the source in a package's folder states, or ``None``."""
    root = folder.parents[package.count(".")]
    try:
        return next(find_written(root, distribution, package), None)
    except OSError:
        return None


def find_written(root: Root, distribution: str, package: str) -> Iterator[str]:
    """Yield the versions that a package below ``root`` states, the most specific file first."""
    base = root.joinpath(*package.split("."))
    for file in (base / "version" / "version", base / "VERSION", base / "version.txt"):
        if file.is_file():
            yield _text(file).strip()
    for file in (base / name for name in _VERSION_FILES):
        if file.is_file():
            try:
                yield from _find_assigned(ast.parse(decode_source(file.read_bytes())))
            except (SyntaxError, ValueError):
                continue
    folders: list[Root] = [root, root.parent] if isinstance(root, Path) else [root]
    for folder in folders:
        if (folder / "pyproject.toml").is_file():
            yield from _find_declared(_text(folder / "pyproject.toml"), distribution, folder)


def _text(file: Root) -> str:
    return file.read_bytes().decode("utf-8", "replace")


def _find_declared(text: str, distribution: str, folder: Root) -> Iterator[str]:
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
    if file and (folder / file).is_file():
        yield _text(folder / file).strip()


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
