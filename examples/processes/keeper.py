"""Starts a command, and at the end kills every process that the command has started.

    python -m examples.processes.keeper PEAK COMMAND ...                a command
    python -m examples.processes.keeper PEAK --fork FILE MODULE ...     a Python module, forked

Ray's daemons leave their parent's session and overwrite their environment, so neither session nor
environment shows which job a daemon belongs to. As a subreaper, this process becomes the parent of
every orphan among its descendants. Ray's daemons therefore stay descendants, and no process of
another Ray session is a descendant. This process kills its descendants when it ends, or when its
parent ends. Subreapers need Linux, as does vLLM's build for CPUs.

With ``--fork`` this process first imports torch and vLLM, and then forks the module's process and
Ray's workers. Without forks, each of eight processes would import torch and vLLM for 14 seconds.
FILE has the module's environment as JSON; this process has none of the shim's variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["WORKERS", "descendants", "main"]

WORKERS = "DEMO_WORKER_PYTHON"
"""Placeholder in a forked module's arguments for Ray's ``py_executable``."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SECONDS_TO_END = 10.0
_SECONDS_BETWEEN_LOOKS = 10.0
"""Seconds between two readings of the memory. A reading takes half a second of processor time, and
the processes' memory grows for minutes."""
_PROC = Path("/proc")
_IMPORTED = (
    "torch",
    "transformers",
    "pandas",
    "datasets",
    "tensordict",
    "vllm.entrypoints.openai.api_server",
)
"""Modules that every process of a job imports. verl is not listed, because the shim waits for
verl's import. Ray and modules that import Ray are not listed, because Ray's import reads a worker's
job from the environment."""


class _Forked:
    """A module that runs in a fork of this process, with the methods of ``subprocess.Popen``."""

    def __init__(self, module: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        fork = multiprocessing.get_context("fork")
        self._process = fork.Process(target=self._run, args=(module, arguments, environment))
        self._process.start()

    @staticmethod
    def _run(module: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        from .forks import begin, execute

        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_DFL)
        begin(environment, os.getcwd())
        execute(["-m", module, *arguments])

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)

    def terminate(self) -> None:
        self._process.terminate()


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status.

    Args:
        arguments: the file for the peak of the memory in bytes, and then the command. The command
            may be ``--fork``, a file with an environment, and a module with its arguments.
    """
    peak_file, *command = arguments
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_CHILD_SUBREAPER, 1), (_PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl({option})")
    with contextlib.ExitStack() as stack:
        if command[0] == "--fork":
            started: Any = _fork(stack, *command[1:])
        else:
            started = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        return _keep(started, Path(peak_file))


def _fork(stack: contextlib.ExitStack, file: str, module: str, *arguments: str) -> _Forked:
    from .forks import ray_workers

    environment = json.loads(Path(file).read_text(encoding="utf-8"))
    for name in _IMPORTED:
        importlib.import_module(name)
    python = stack.enter_context(ray_workers())
    return _Forked(module, [one.replace(WORKERS, python) for one in arguments], environment)


def _keep(started: Any, peak_file: Path) -> int:
    peak = 0
    try:
        while started.poll() is None:
            peak = max(peak, sum(map(_memory, descendants(os.getpid()))))
            peak_file.write_text(json.dumps(peak), encoding="utf-8")
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(_SECONDS_BETWEEN_LOOKS)
        return int(started.poll())
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end(started)


def _stop(*_: Any) -> NoReturn:
    sys.exit(1)


def _end(started: Any) -> None:
    """Terminate the command, which ends Ray; then kill all processes that are left."""
    if started.poll() is None:
        started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(_SECONDS_TO_END)
    while left := list(descendants(os.getpid())):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


def descendants(ancestor: int) -> Iterator[int]:
    """All descendants of a process, including ended processes that no parent has waited for."""
    children: dict[int, list[int]] = {}
    for place in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # ``stat`` has the process's name in brackets; the name may contain brackets and spaces.
            parent = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(place.name))
    waiting = [ancestor]
    while waiting:
        found = children.get(waiting.pop(), [])
        yield from found
        waiting += found


def _memory(process: int) -> int:
    """Bytes of memory that a process uses, with its share of shared pages; 0 if unreadable."""
    with contextlib.suppress(OSError):
        for line in (_PROC / str(process) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
