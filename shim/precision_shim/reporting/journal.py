"""Store the shim's choices (``Decision``) for ``status()``, and print each on rank 0's stderr.

Until the shim makes a choice, it prints nothing: pip, compile workers and inference engines may
inherit the shim's environment variables.
"""

from __future__ import annotations

import os
import sys
import warnings

from ..errors import PrecisionShimWarning
from ..precision.findings import Decision
from ..process.forks import Lock
from ..process.standby import say

_lock = Lock(patching=False)
_decisions: dict[Decision, None] = {}
_warned: set[str] = set()
verbosity = "info"
"""How much is logged: ``quiet``, ``info`` or ``debug``; set by ``install()``."""


def record(decision: Decision, *, warns: bool = False) -> None:
    """Store and print a choice of the shim; do nothing if the same choice is already stored.

    With ``warns``, rank 0 warns instead of printing.
    """
    with _lock:
        if decision in _decisions:
            return
        _decisions[decision] = None
    if not warns:
        log(str(decision))
    elif _is_rank_0():
        warn(str(decision), stacklevel=None)


def log(line: str) -> None:
    """Print a line to stderr: on rank 0, on all ranks (``log=debug``) or on none (``quiet``)."""
    if verbosity != "quiet" and (_is_rank_0() or verbosity == "debug"):
        say(line)


def decisions() -> tuple[Decision, ...]:
    """Return the shim's choices in this process, oldest first."""
    with _lock:
        return tuple(_decisions)


def warn(message: str, stacklevel: int | None = 2) -> None:
    """Warn once per message and process; ``stacklevel=None`` shows no source line."""
    with _lock:
        if message in _warned:
            return
        _warned.add(message)
    try:
        if stacklevel is None:  # during an import, the line shown would be importlib's
            warnings.warn_explicit(message, PrecisionShimWarning, "<precision_shim>", 1)
        else:
            warnings.warn(message, PrecisionShimWarning, stacklevel=stacklevel + 1)
    except ValueError:  # warnings.warn raises ValueError if stderr is closed
        if not getattr(sys.stderr, "closed", False):
            raise


def warn_or_say(text: str) -> None:
    """Warn the user; if a filter turns warnings into errors, only print the text."""
    try:
        warn(text, stacklevel=None)
    except PrecisionShimWarning:
        say(text)


def clear() -> None:
    """Drop decisions and warnings, for a new ``install()`` and for tests."""
    with _lock:
        _decisions.clear()
        _warned.clear()


def _is_rank_0() -> bool:
    # Before torch.distributed is initialized, the rank is in RANK, which torchrun and Ray set.
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") in ("", "0")
