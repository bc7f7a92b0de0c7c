"""The process's decisions: kept for ``status()``, one line each on stderr of rank 0.

A line appears only in a process that decided something, so that pip, compile workers and
inference engines, which inherit the variables, stay silent.
"""

from __future__ import annotations

import os
import sys
import warnings

from ..errors import PrecisionShimWarning
from ..process import startup as _startup
from ..process.forks import Lock
from .record import Decision

say = _startup.say
_lock = Lock(patching=False)
_decisions: list[Decision] = []
_warned: set[str] = set()
verbosity = "info"
"""One of ``quiet``, ``info``, ``debug``: set by the session from the settings."""


def record(decision: Decision) -> None:
    """Keep and announce a decision, once even if it repeats (several model chunks)."""
    with _lock:
        if decision in _decisions:
            return
        _decisions.append(decision)
    announce(str(decision))


def announce(line: str) -> None:
    """Print a line to stderr on rank 0; with ``log=debug`` on all ranks, with ``quiet`` on none."""
    if verbosity != "quiet" and (_is_rank_0() or verbosity == "debug"):
        say(line)


def decisions() -> tuple[Decision, ...]:
    """The decisions of this process so far, oldest first."""
    with _lock:
        return tuple(_decisions)


def warn(message: str, stacklevel: int | None = 2) -> None:
    """Warn once per message and process; with ``stacklevel=None`` without a source line."""
    with _lock:
        if message in _warned:
            return
        _warned.add(message)
    try:
        if stacklevel is None:  # from within an import: a source line would show importlib's
            warnings.warn_explicit(message, PrecisionShimWarning, "<precision_shim>", 1)
        else:
            warnings.warn(message, PrecisionShimWarning, stacklevel=stacklevel + 1)
    except ValueError:  # warnings raises it where stderr is closed
        if not getattr(sys.stderr, "closed", False):
            raise


def clear() -> None:
    """Forget decisions and warnings, for a fresh ``install()`` and for tests."""
    with _lock:
        _decisions.clear()
        _warned.clear()


def _is_rank_0() -> bool:
    # torch.distributed knows the rank once it is initialized; torchrun and Ray set RANK before.
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") in ("", "0")
