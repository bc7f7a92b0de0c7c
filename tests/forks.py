"""Forks of ``examples.processes.forks`` for the tests' launches."""

from __future__ import annotations

import contextlib
import sys

from examples.processes.forks import begin, execute, ray_workers

from .rank_server import Launch

WORKER_PYTHON = "TEST_WORKER_PYTHON"
"""Names in a driver's environment what Ray is to run instead of Python: ``py_executable``."""


def script(launch: Launch) -> None:
    """A rank's case: ``python SCRIPT ARGUMENT ...``; of several each finds its ``RANK``.

    Options: ``arguments``, ``environment``, ``cwd``, and ``workers``, true of a driver: see
    ``WORKER_PYTHON``.
    """
    options = launch.options
    environment = dict(options["environment"])
    if launch.world > 1:
        environment["RANK"] = str(launch.rank)
    with contextlib.ExitStack() as stack:
        if options.get("workers"):
            environment[WORKER_PYTHON] = stack.enter_context(ray_workers())
        begin(environment, options["cwd"])
        execute(options["arguments"])


def tests(launch: Launch) -> int:
    """A rank's case: ``python -m pytest ARGUMENT ...``; returns its exit status.

    Options: ``arguments``, ``environment`` and ``cwd``.
    """
    options = launch.options
    begin(options["environment"], options["cwd"])
    sys.path.insert(0, options["cwd"])
    # Some of what the server imported is plugins, too.
    arguments = ["-W", "ignore::pytest.PytestAssertRewriteWarning", *options["arguments"]]
    sys.argv = ["pytest", *arguments]
    import pytest

    return int(pytest.main(arguments))
