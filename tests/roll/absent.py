"""Stands in for packages that ROLL imports and that no test calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

ABSENT = ("PIL", "transfer_queue", "opentelemetry", "grpc", "pybase64")
"""ROLL's workers use these packages for queues, tracing and images, but not for training."""


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of ``ABSENT`` in a process that imports ROLL; each name is a mock."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ABSENT and "roll" in sys.modules:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _mocked  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _mocked(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return mock.MagicMock(name=name)


def stand_in() -> None:
    """Make ROLL importable until the process ends.

    Ray's own processes, which import some of these packages if they find them, find none.
    """
    sys.meta_path.append(_Absent())
