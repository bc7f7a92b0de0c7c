"""Find out which version of a framework is installed and how it differs from recorded versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..seams._source import find_spec
from .framework import Adapter
from .registry import is_tested, shared
from .stated_version import stated_version

__all__ = ["describe", "judge_version", "tell_missed", "version_of"]


def version_of(distribution: str, packages: Iterable[str]) -> str | None:
    """Return the version of the package that this process would import, without importing it.

    The version is read from the distribution's metadata. If the metadata is absent or belongs to
    another copy of the package, the package's source is read. Returns ``"unknown"`` if metadata and
    source state no version, and ``None`` if neither metadata nor package is found.
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import distribution as installed

    try:
        known = installed(distribution)
    except PackageNotFoundError:
        known = None
    told = None if known is None else known.version
    for package in packages:
        try:
            spec = find_spec(package)
        except Exception:  # another package's finder may raise any error
            continue
        if spec is None:
            continue
        folders = [Path(location).resolve() for location in spec.submodule_search_locations or ()]
        if known is not None:
            own = Path(str(known.locate_file(package.replace(".", "/")))).resolve()
            if own in folders or not folders:
                return told
        stated = (stated_version(distribution, package, folder) for folder in folders)
        return next(filter(None, stated), None) or told or "unknown"
    return told


def describe(adapter: Adapter) -> str:
    """Return a framework's name and version, for messages."""
    version = version_of(adapter.distribution, adapter.packages)
    return f"{adapter.framework} {version or '(not installed)'}"


def judge_version(
    adapter: Adapter,
    version: str,
    versions: Callable[[str, Iterable[str]], str | None],
    *,
    closely: bool = False,
) -> tuple[bool, str]:
    """Return whether a version is tested, and how its code differs from tested versions.

    Args:
        adapter: the framework's adapter.
        version: the framework's version.
        versions: function that returns the version of a backend's distribution, like
            ``version_of``.
        closely: whether to compare code with ``symbols.json`` even if that file lists ``version``.
    """
    from . import symbols as _symbols

    beneath = {name: versions(name, (package,)) for package, name in shared().items()}
    tested = is_tested(version, adapter.tested)
    told = [] if tested else [f"not among the tested versions: {', '.join(adapter.tested)}"]
    told += _symbols.likeness(adapter, version, beneath)
    told += _symbols.describe_differences(adapter, version, beneath) if closely else []
    return tested, "; ".join(told)


def tell_missed(
    adapter: Adapter,
    versions: Callable[[str, Iterable[str]], str | None] | None = None,
) -> Callable[[str], str]:
    """Return a function from a missing symbol to a version that has the symbol, or ``""``."""
    from . import symbols as _symbols

    known = _symbols.missed(adapter, versions or version_of)

    def tell(target: str) -> str:
        try:
            return known(target)
        except Exception:
            # status() reports a damaged symbols.json, which must not break the framework's import.
            return ""

    return tell
