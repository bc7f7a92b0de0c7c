"""Read source from a wheel (without unpacking it) or a folder, without executing the source.

``open_tree`` opens a path as a ``Tree``, which is a ``_source.Source``. ``over`` makes a source
that reads a tree first, and then the installed packages.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import decode_source
from pathlib import Path
from typing import Any

from precision_shim.errors import SourceError
from precision_shim.process.stated_version import Folder, find_written, normal
from precision_shim.seams._source import Installed, Source

_BENEATH = ("src", "python", "lib/python3*/site-packages", "Lib/site-packages")
"""Subfolders of a folder, a checkout or a virtual environment that may contain packages."""


def _open_wheel(path: Path) -> Any:
    try:
        wheel = zipfile.ZipFile(path)
        broken = wheel.testzip()
    except (OSError, ValueError, NotImplementedError, EOFError, zipfile.BadZipFile) as error:
        raise SourceError(f"{path} is no wheel that can be read: {error}.") from error
    except Exception as error:  # zlib.error, from damaged data
        raise SourceError(f"{path} is no wheel that can be read: {error!r}.") from error
    if broken is not None:
        raise SourceError(f"{path} is no wheel that can be read: {broken} in it is damaged.")
    return zipfile.Path(wheel)


class Tree:
    """The packages of a wheel or a folder, as a ``Source``.

    Attributes:
        complete: whether the tree is a whole environment (a site-packages folder). A module that a
            complete tree lacks counts as not found, even if the module is installed.
    """

    def __init__(self, root: Any, metadata: Any) -> None:
        self._files = Folder(root)
        self._metadata = dict(_distributions(metadata))
        self.complete = isinstance(root, Path) and any(
            name.endswith(".dist-info") for name in self._files.top()
        )

    def find(self, module: str) -> Callable[[], str | None] | None:
        """See ``Source``."""
        place = self._place(module)
        if place is None:
            return None
        return lambda: decode_source(self._files.read(place)) if place else None

    def has(self, package: str) -> bool:
        """Whether the tree has a package, with an ``__init__.py``."""
        return bool(self._place(package))

    def owns(self, module: str) -> bool:
        """Whether the tree has the module's package, so that no other source is read for it.

        A folder without ``__init__.py`` does not count, as several distributions may share it.
        """
        parts = module.split(".")
        return any(self._place(".".join(parts[:depth])) for depth in range(1, len(parts) + 1))

    def version_of(self, distribution: str, package: str) -> str:
        """Return a distribution's version from metadata, or else source, or else ``"unknown"``."""
        known = self._metadata.get(normal(distribution))
        return known or next(find_written(self._files, distribution, package), None) or "unknown"

    def _place(self, module: str) -> str | None:
        """Return a module's file; ``""`` for a bare folder, ``None`` if the module is not found."""
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            if self._files.is_file(f"{path}/__init__.py"):
                place = f"{path}/__init__.py"
            elif self._files.is_file(f"{path}.py"):
                place = f"{path}.py"
                if depth < len(parts):
                    return None  # a module that is no package contains no modules
            elif self._files.is_folder(path):
                place = ""
            else:
                return None
        return place


def _distributions(root: Any) -> Iterator[tuple[str, str]]:
    """Yield name and version of each distribution whose metadata is in a folder or a wheel."""
    for folder in root.iterdir():
        for kind, file in ((".dist-info", "METADATA"), (".egg-info", "PKG-INFO")):
            if folder.name.endswith(kind) and (folder / file).is_file():
                text = (folder / file).read_bytes().decode("utf-8", "replace")
                text = text.replace("\r\n", "\n").partition("\n\n")[0]
                head = dict(re.findall(r"^(Name|Version): *(\S+)", text, re.MULTILINE))
                if len(head) == 2:
                    yield normal(head["Name"]), head["Version"]


@dataclass(frozen=True)
class _Over:
    tree: Tree
    beneath: Source

    def find(self, module: str) -> Callable[[], str | None] | None:
        first = self.tree.complete or self.tree.owns(module)
        return (self.tree if first else self.beneath).find(module)


def over(tree: Tree) -> Source:
    """Return a source that reads modules from a tree, or else from the installed packages."""
    return _Over(tree, Installed())


def open_tree(path: Path, packages: tuple[str, ...]) -> Tree:
    """Open a path as a tree.

    Args:
        path: a wheel, a checkout, a folder with packages, a package's own folder, or a virtual
            environment.
        packages: names of packages; the path must contain at least one of them.

    Raises:
        SourceError: the path cannot be read or contains none of the packages.
    """
    looked_for = f"Looked for: {', '.join(packages)}."
    if not path.exists():
        raise SourceError(f"{path} does not exist. {looked_for}")
    where = ""
    if path.is_file():
        wheel = _open_wheel(path)
        # A wheel may have its packages in NAME.data/purelib.
        data = [part for part in wheel.iterdir() if part.name.endswith(".data")]
        trees = [(part / kind, wheel) for part in data for kind in ("purelib", "platlib")]
        trees.insert(0, (wheel, wheel))
    else:
        inner = [path, *(place for part in _BENEATH for place in sorted(path.glob(part)))]
        # If the path is a package's own folder, the root is its parent folder.
        inner += [path.resolve().parent] if (path / "__init__.py").is_file() else []
        trees = [(folder, folder) for folder in inner if folder.is_dir()]
        where = ", neither in itself nor in src, python or lib/python3*/site-packages"
    for root, metadata in trees:
        tree = Tree(root, metadata)
        if any(tree.has(package) for package in packages):
            return tree
    raise SourceError(f"{path} holds no framework{where}. {looked_for}")
