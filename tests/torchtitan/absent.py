"""Stands in for the packages from which torchtitan imports only names."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StandIn(types.ModuleType):
    """A module of a missing package: every name in it is a class that takes any arguments."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *given, **named: None})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the missing packages."""

    def __init__(self, *names: str) -> None:
        self.names = {one for one in names if importlib.util.find_spec(one) is None}

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextmanager
def standing_in(*names: str) -> Iterator[None]:
    """Stand in for those of these packages that are not installed."""
    finder = Finder(*names)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [one for one in sys.modules if one.partition(".")[0] in finder.names]:
            del sys.modules[name]
