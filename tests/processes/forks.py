"""What a fork of ``tests/processes/rank_server.py`` runs: a script, a module, or pytest."""

from __future__ import annotations

import contextlib
import sys

from examples.processes.forks import begin, execute, ray_workers

from .rank_server import Launch

WORKER_PYTHON = "TEST_WORKER_PYTHON"
"""A driver's variable with the program that Ray runs instead of Python (``py_executable``)."""


def script(launch: Launch) -> None:
    """Run ``python SCRIPT ARGUMENT ...`` in a rank; each of several ranks gets its ``RANK``.

    Options are ``arguments``, ``environment``, ``cwd``, and ``workers`` for a driver, which then
    gets ``WORKER_PYTHON``.
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


def module(launch: Launch) -> int:
    """Run ``python -m MODULE ARGUMENT ...``, as ``script``; returns its exit status."""
    try:
        script(launch)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def tests(launch: Launch) -> int:
    """Run ``python -m pytest ARGUMENT ...`` in a rank; returns its exit status.

    Options: ``arguments``, ``environment`` and ``cwd``.
    """
    options = launch.options
    begin(options["environment"], options["cwd"])
    sys.path.insert(0, options["cwd"])
    # The server has already imported some of pytest's plugins.
    arguments = ["-W", "ignore::pytest.PytestAssertRewriteWarning", *options["arguments"]]
    sys.argv = ["pytest", *arguments]
    import pytest

    return int(pytest.main(arguments))
