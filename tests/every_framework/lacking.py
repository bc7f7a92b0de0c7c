"""What a driver is told of Ray workers with the shim, and then of one without the package."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

HIDES = "import sys\nsys.modules['precision_shim'] = None\n"
"""A ``sitecustomize`` with which an import of the package fails, as where it is not installed."""


def assert_told(found: list[list[str]], framework: str) -> None:
    """Assert that nothing was said before the worker without the package, and one line of it."""
    silent, told = found
    assert silent == []
    (text,) = told
    assert f": {framework}." in text
    assert "the package is not installed there" in text


def answers() -> list[str]:
    """A list that gets the name of each process on Ray whose answer this driver reads."""
    from precision_shim.process import session

    found: list[str] = []
    if session._current is None:
        return found
    actors = session._current.actors
    judge = actors._judge

    def noted(name: str, *answer: Any) -> None:
        found.append(name)
        judge(name, *answer)

    actors._judge = noted  # type: ignore[method-assign]
    return found


def listen() -> list[str]:
    """A list, which grows by each warning about a process that this driver starts on Ray."""
    told: list[str] = []

    def show(message: Any, *_: Any, **__: Any) -> None:
        if "started on Ray" in str(message):
            told.append(str(message))

    warnings.simplefilter("always")
    warnings.showwarning = show
    return told


def _heard() -> None:
    """Wait until each process that was asked has answered."""
    import ray

    from precision_shim.process import session

    while session._current.actors._waiting:
        ray.get(ray.put(time.sleep(0.05)))


def without_the_package(told: list[str], make: Callable[[dict[str, Any]], Any]) -> list[list[str]]:
    """Start a worker that cannot import the package; what was told before it, and because of it.

    Args:
        told: the list of ``listen``, from before this driver started its workers.
        make: starts the worker in a runtime environment.
    """
    _heard()
    before = [*told]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(HIDES)
        path = os.pathsep.join((folder, os.environ["PYTHONPATH"]))
        made = make({"env_vars": {"PYTHONPATH": path}})
        _heard()
        del made
    return [before, told[len(before) :]]
