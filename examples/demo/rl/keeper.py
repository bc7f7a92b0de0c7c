"""Starts a command and ends all that it started: ``python -m examples.demo.rl.keeper COMMAND``.

Ray's daemons leave their parent's session and overwrite their environment, so that neither tells
whose they are. This process adopts every orphan beneath it (Linux: a subreaper), hence all of them
are its descendants, and no process of another Ray session is. At its end, or when whoever started
it ends, it kills them. Linux alone; vLLM's build for CPUs has no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["descendants", "main"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SECONDS_TO_END = 10.0
_SECONDS_BETWEEN_LOOKS = 10.0
"""At the memory: a look takes half a second of a processor, and the processes grow for minutes."""
_PROC = Path("/proc")


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status.

    Args:
        arguments: a file for the peak of the memory in bytes, then the command.
    """
    peak_file, *command = arguments
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_CHILD_SUBREAPER, 1), (_PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl({option})")
    peak = 0
    started = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        while started.poll() is None:
            peak = max(peak, sum(map(_memory, descendants(os.getpid()))))
            Path(peak_file).write_text(json.dumps(peak), encoding="utf-8")
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(_SECONDS_BETWEEN_LOOKS)
        return started.returncode
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end(started)


def _stop(*_: Any) -> NoReturn:
    sys.exit(1)


def _end(started: subprocess.Popen[bytes]) -> None:
    """Let the command end by itself, Ray with it, then kill what is left."""
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
    """The processes beneath one, those that ended and were not waited for included."""
    children: dict[int, list[int]] = {}
    for place in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name in brackets may hold brackets and spaces.
            parent = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(place.name))
    waiting = [ancestor]
    while waiting:
        found = children.get(waiting.pop(), [])
        yield from found
        waiting += found


def _memory(process: int) -> int:
    """Bytes of a process, its share of what it shares; 0 where it cannot be read."""
    with contextlib.suppress(OSError):
        for line in (_PROC / str(process) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
