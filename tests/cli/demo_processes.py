"""Runs of the demo without the seconds of importing torch in each; ``tests/rank_server.py``.

The server has imported what verl stands on, and neither verl nor Megatron. A run is a fork of it
that calls the command line, and the demo's workers are forks of that: processes of their own, in
which the shim is installed before verl is imported, as in those that the demo itself starts.
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
    """Import what is neither verl's nor Megatron's, in the server."""
    fresh_processes.prepare()
    for name in ("matplotlib.pyplot", "rich.progress", "rich.table"):
        importlib.import_module(name)


class Forked:
    """``subprocess.Popen`` for a worker of the demo: forked instead of started."""

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
        """Its exit status, once it has ended."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Its exit status."""
        return self._wait(0)

    def kill(self) -> None:
        """End it."""
        os.kill(self._pid, 9)

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self._pid, options)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


@contextlib.contextmanager
def _ended() -> Iterator[None]:
    """End this process behind the block: what would follow is the parent's."""
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
    """Write to these; the parent's streams may be locked by a thread that is not in a fork."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def run(launch: Launch) -> int:
    """``precision-shim demo`` with the launch's arguments; returns its exit status."""
    from examples.demo import runs

    from precision_shim.cli import main

    folder = Path(launch.folder)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]  # the server's: the command line is no rank
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
