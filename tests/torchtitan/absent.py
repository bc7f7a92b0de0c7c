"""Stands in for the packages from which torchtitan's RL package imports only names."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import types
from typing import Any

ABSENT = tuple(one for one in ("vllm", "renderers") if importlib.util.find_spec(one) is None)


class StandIn(types.ModuleType):
    """A module of a missing package: every name that is imported from it is a class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the missing packages."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
