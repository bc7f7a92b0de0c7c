"""Find out which version of a framework is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..seams._source import find_spec
from .framework import Adapter
from .stated_version import stated_version

Versions = Callable[[str, Iterable[str]], "str | None"]
"""Maps a distribution and its packages to the distribution's version, like ``version_of``."""


def version_of(distribution: str, packages: Iterable[str]) -> str | None:
    """Return the version of the package that this process would import, without importing it.

    If the distribution's metadata is absent or of another copy of the package, the package's source
    is read. Returns ``"unknown"`` if metadata and source state no version, and ``None`` if neither
    metadata nor package is found.
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import distribution as installed

    try:
        metadata = installed(distribution)
    except PackageNotFoundError:
        metadata = None
    version = None if metadata is None else metadata.version
    for package in packages:
        try:
            spec = find_spec(package)
        except Exception:  # another package's finder may raise any error
            continue
        if spec is None:
            continue
        folders = [Path(location).resolve() for location in spec.submodule_search_locations or ()]
        if metadata is not None:
            place = Path(str(metadata.locate_file(package.replace(".", "/")))).resolve()
            if place in folders or not folders:
                return version
        stated = (stated_version(distribution, package, folder) for folder in folders)
        return next(filter(None, stated), None) or version or "unknown"
    return version


def describe(adapter: Adapter) -> str:
    """Return a framework's name and version, for messages."""
    version = version_of(adapter.distribution, adapter.packages)
    return f"{adapter.framework} {version or '(not installed)'}"
