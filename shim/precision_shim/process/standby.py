"""Whether this process waits for the import of a framework, and how to stop waiting.

A process waits first with the finder of ``zz_precision_shim.py``, then with the ``Watcher`` of
``startup.init``. This module imports none of our modules that do more than watch imports.
"""

import os
import sys

from .finders import take_out
from .names import ON, VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .finders import Watcher

FIRST = "PrecisionShimStart"
"""Name of the class that ``zz_precision_shim.py`` puts into ``sys.meta_path``."""

called = False
"""Whether this process has begun or refused to wait; a process does so once."""

watcher: "Watcher | None" = None
"""The import hook of ``startup.init`` while the process waits with it."""


def asked() -> bool:
    """Whether the environment switches the shim on, with a valid value."""
    return os.environ.get(VARIABLE, "").strip().lower() in (*ON, "strict")


def waiting() -> bool:
    """Whether this process waits for a framework's import."""
    return watcher is not None or (not called and first_finder() is not None and asked())


def stop() -> None:
    """Stop waiting for imports: the session waits from now on, or the shim was removed."""
    global called, watcher
    first = first_finder()
    if first is not None:
        called = True
        take_out(first)
    if watcher is not None:
        watcher.remove()
        watcher = None


def first_finder() -> "Any":
    """The finder that ``zz_precision_shim.py`` put into ``sys.meta_path``, or ``None``."""
    return next((finder for finder in sys.meta_path if type(finder).__name__ == FIRST), None)


def say(line: str) -> None:
    """Write one line to stderr, not to ``logging``, which a framework may reconfigure later.

    If stderr is ``None`` (in some daemons), closed, or a file on a full disk, the line is lost.
    """
    try:
        if sys.stderr is not None:
            print(f"[precision_shim] {line}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass
