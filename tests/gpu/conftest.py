"""The benchmarks are not installed: the fixture imports them from the clone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of ``benchmarks.gpu`` by its name."""
    monkeypatch.syspath_prepend(str(ROOT))
    yield lambda name: importlib.import_module(f"benchmarks.gpu.{name}")
    for name in [one for one in sys.modules if one.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
