"""Stand-ins for packages that are not installed: every name exists and does nothing.

The stand-ins let a test import a real class of a framework whose module imports such packages. The
test may call only code that uses none of the missing packages.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Anything(type):
    """A class that serves as a base class, a decorator or an annotation, as do its attributes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def nothing(name: str) -> Any:
    """A class that does nothing; as a decorator with arguments it returns the decorated object."""
    return Anything(
        name,
        (),
        {
            "__init__": lambda self, *args, **kwargs: None,
            "__call__": lambda self, *args, **kwargs: args[0] if args else None,
        },
    )


class EmptyModule(ModuleType):
    """A module in which every name exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)


class Empty:
    """A finder for ``sys.meta_path`` that finds every module of the named packages."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.packages:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> Any:
        return EmptyModule(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


@contextlib.contextmanager
def empty_packages(*packages: str) -> Iterator[None]:
    """Let modules import from the named packages, which are not installed."""
    known, finder = set(sys.modules), Empty(*packages)
    sys.meta_path.append(finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for module in set(sys.modules) - known:
            if module.partition(".")[0] in packages:
                del sys.modules[module]
