"""A pytest plugin that measures where a test run's time goes, and writes it into the JUnit report.

``toxfile.py`` reads the report and prints the times at the end of a run. Loaded by
``tests/conftest.py``.

The file's name matters: Python ignores frames whose file name contains both ``importlib`` and
``_bootstrap`` when it counts a warning's stack level. This file adds one frame to each import.
"""

from __future__ import annotations

import resource
import sys
import time
from importlib import _bootstrap
from typing import Any

import pytest

_STARTS = frozenset(("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"))
"""CPython's audit events, one for each process that this process starts."""


class Timing:
    """Measures the seconds spent on imports, and counts the processes that are started."""

    def __init__(self) -> None:
        self.imports = 0.0
        self.started = 0
        self._depth = 0
        self._find_and_load: Any = _bootstrap._find_and_load  # type: ignore[attr-defined]

    def begin(self) -> None:
        sys.addaudithook(self._seen)  # for ever: Python cannot remove an audit hook
        _bootstrap._find_and_load = self._timed  # type: ignore[attr-defined]

    def end(self) -> None:
        """Restore the import system."""
        _bootstrap._find_and_load = self._find_and_load  # type: ignore[attr-defined]

    def _seen(self, event: str, _: tuple[Any, ...]) -> None:
        if event in _STARTS:
            self.started += 1

    def _timed(self, *args: Any) -> Any:
        # The time of a nested import is part of the outer import's time.
        begin = time.perf_counter()
        self._depth += 1
        try:
            return self._find_and_load(*args)
        finally:
            self._depth -= 1
            if not self._depth:
                self.imports += time.perf_counter() - begin


_timing = pytest.StashKey[Timing]()


def pytest_configure(config: pytest.Config) -> None:
    timing = config.stash[_timing] = Timing()
    timing.begin()


@pytest.fixture(scope="session", autouse=True)
def _report_timing(pytestconfig: pytest.Config, record_testsuite_property: Any) -> Any:
    """Write the figures after the last test."""
    yield
    timing = pytestconfig.stash[_timing]
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    record_testsuite_property("seconds of imports", round(timing.imports, 1))
    record_testsuite_property("processes started", timing.started)
    record_testsuite_property(
        "processor seconds of these", round(children.ru_utime + children.ru_stime, 1)
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_timing].end()
