"""Runs the demo in forks, without importing torch anew in each process.

The server (``tests/rank_server.py``) has imported verl's dependencies, but neither verl nor
Megatron. Each run is a fork that calls the command line and forks the demo's workers. As in the
demo itself, a worker is a process that installs the shim before it imports verl.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..rank_server import Launch
from ..verl import fresh_processes

WORKER = [sys.executable, "-m", "examples.demo.worker"]


def prepare() -> None:
    """Import in the server what the demo needs, except verl and Megatron."""
    fresh_processes.prepare()
    for name in ("matplotlib.pyplot", "rich.progress", "rich.table"):
        importlib.import_module(name)


class Forked:
    """Replaces ``subprocess.Popen`` for the demo's workers: it forks a worker."""

    def __init__(
        self,
        command: list[str],
        *,
        stdin: int,
        stdout: Any,
        stderr: int,
        env: dict[str, str],
        pass_fds: tuple[int, ...],
        cwd: Path,
    ) -> None:
        assert command[:3] == WORKER
        assert (stdin, stderr) == (subprocess.DEVNULL, subprocess.STDOUT)
        self._code: int | None = None
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            with _ended():
                _output(stdout.fileno(), stdout.fileno())
                os.chdir(cwd)
                os.environ.clear()
                os.environ.update(env)
                from examples.demo import worker

                worker.main(command[3:])

    def poll(self) -> int | None:
        """The worker's exit status, or ``None`` while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        os.kill(self._pid, 9)

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self._pid, options)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


@contextlib.contextmanager
def _ended() -> Iterator[None]:
    """End this process after the block, so that it does not run the parent's code."""
    status = 1
    try:
        yield
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _output(stdout: int, stderr: int) -> None:
    """Redirect stdout and stderr; a thread of the parent may have locked the parent's streams."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def run(launch: Launch) -> int:
    """Run ``precision-shim demo`` with the launch's arguments; returns its exit status."""
    from examples.demo import runs

    from precision_shim.cli import main

    folder = Path(launch.folder)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]  # the server sets variables of ranks, but the command line is no rank
    os.environ.update(launch.options["variables"])
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        _output(stdout.fileno(), stderr.fileno())
    runs.subprocess = type("subprocess", (), {**vars(subprocess), "Popen": Forked})
    try:
        main(["demo", *launch.options["arguments"]])
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
