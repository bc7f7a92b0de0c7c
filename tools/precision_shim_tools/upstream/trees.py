"""Read source from a wheel (without unpacking it) or a folder, without executing the source.

``open_tree`` opens a path as a ``Tree``; ``over`` makes a ``Source`` that reads a tree first, and
then the installed packages.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from email.parser import BytesHeaderParser
from importlib.util import decode_source
from pathlib import Path
from typing import TYPE_CHECKING

from precision_shim.errors import SourceError
from precision_shim.process.stated_version import find_written, normal
from precision_shim.seams._source import Reader, Source, installed

if TYPE_CHECKING:
    from precision_shim.process.stated_version import Root

_BENEATH = ("src", "python", "lib/python3*/site-packages", "Lib/site-packages")
"""Subfolders of a folder, a checkout or a virtual environment that may contain packages."""


def _roots_of_wheel(path: Path) -> list[zipfile.Path]:
    """Return the folders of a wheel that may contain packages, the top folder first."""
    try:
        opened = zipfile.ZipFile(path)
        broken = opened.testzip()
    except (OSError, ValueError, NotImplementedError, EOFError, zipfile.BadZipFile) as error:
        raise SourceError(f"{path} is no wheel that can be read: {error}.") from error
    except Exception as error:  # zlib.error, from damaged data
        raise SourceError(f"{path} is no wheel that can be read: {error!r}.") from error
    if broken is not None:
        raise SourceError(f"{path} is no wheel that can be read: {broken} in it is damaged.")
    top = zipfile.Path(opened)
    data = [folder for folder in top.iterdir() if folder.name.endswith(".data")]
    return [top, *(folder / library for folder in data for library in ("purelib", "platlib"))]


class Tree:
    """The packages of a wheel or a folder.

    Attributes:
        complete: whether the tree is a whole environment (a site-packages folder), so that a module
            that it lacks counts as not found, even if the module is installed.
    """

    def __init__(self, root: Root, top: Root) -> None:
        self._root = root
        self._metadata = dict(_distributions(top))
        self.complete = isinstance(root, Path) and any(
            folder.name.endswith(".dist-info") for folder in root.iterdir()
        )

    def find(self, module: str) -> Reader | None:
        """The tree as a ``Source``."""
        place = self._place(module)
        if place is None:
            return None
        return lambda: decode_source(place.read_bytes()) if place.is_file() else None

    def has(self, package: str) -> bool:
        """Whether the tree has a package, with an ``__init__.py``."""
        place = self._place(package)
        return place is not None and place.is_file()

    def owns(self, module: str) -> bool:
        """Whether the tree has the module's package, so that no other source is read for it.

        A folder without ``__init__.py`` does not count, as several distributions may share it.
        """
        parts = module.split(".")
        return any(self.has(".".join(parts[:depth])) for depth in range(1, len(parts) + 1))

    def version_of(self, distribution: str, package: str) -> str:
        """Return a distribution's version from metadata, or else source, or else ``"unknown"``."""
        known = self._metadata.get(normal(distribution))
        return known or next(find_written(self._root, distribution, package), None) or "unknown"

    def _place(self, module: str) -> Root | None:
        """Return a module's file, or a bare folder; ``None`` if the module is not found."""
        *above, name = module.split(".")
        folder = self._root.joinpath(*above)
        for place in (folder / name / "__init__.py", folder / f"{name}.py"):
            if place.is_file():
                return place
        return folder / name if (folder / name).is_dir() else None


def _distributions(top: Root) -> Iterator[tuple[str, str]]:
    folders: list[Root] = [*top.iterdir()]
    for folder in sorted(folders, key=str):
        for kind, name in ((".dist-info", "METADATA"), (".egg-info", "PKG-INFO")):
            file = folder / name
            if folder.name.endswith(kind) and file.is_file():
                head = BytesHeaderParser().parsebytes(file.read_bytes())
                if head["Name"] and head["Version"]:
                    yield normal(head["Name"]), head["Version"]


def over(*trees: Tree) -> Source:
    """Return a source that reads modules from the first tree with them, or else as installed."""

    def find(module: str) -> Reader | None:
        inside = (tree.find for tree in trees if tree.complete or tree.owns(module))
        return next(inside, installed)(module)

    return find


def submodules(path: Path) -> Iterator[Path]:
    """The folders of a checkout's git submodules, and of theirs, filled or empty."""
    file = path / ".gitmodules"
    if file.is_file():
        for inner in re.findall(r"^\s*path *= *(.+?)\s*$", file.read_text("utf-8"), re.MULTILINE):
            folder = (path / inner).resolve()
            if path.resolve() in folder.parents:
                yield folder
                yield from submodules(folder)


def open_tree(path: Path, packages: tuple[str, ...]) -> Tree:
    """Open a wheel, checkout, folder with packages, package's folder, or virtual environment.

    Raises:
        SourceError: the path cannot be read or contains none of the ``packages``.
    """
    looked_for = f"Looked for: {', '.join(packages)}."
    if not path.exists():
        raise SourceError(f"{path} does not exist. {looked_for}")
    roots: list[Root] = []
    if path.is_file():
        where = ""
        roots += _roots_of_wheel(path)
    else:
        where = ", neither in itself nor in src, python or lib/python3*/site-packages"
        inner = [path, *(place for part in _BENEATH for place in sorted(path.glob(part)))]
        roots += (folder for folder in inner if folder.is_dir())
        if (path / "__init__.py").is_file():  # a package's folder
            roots.append(path.resolve().parent)
    for root in roots:
        tree = Tree(root, roots[0] if path.is_file() else root)
        if any(tree.has(package) for package in packages):
            return tree
    raise SourceError(f"{path} holds no framework{where}. {looked_for}")
