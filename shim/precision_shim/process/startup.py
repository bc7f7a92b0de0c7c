"""Start-up: an import hook in a process whose environment switches the shim on.

Every process of a cluster may inherit ``PRECISION_SHIM``, pip and compile workers included. The
file ``zz_precision_shim.pth`` therefore only executes ``zz_precision_shim.py``, whose finder waits
for the frameworks' own packages. When Python searches for a framework's package, the finder calls
``take_over()``. ``take_over()`` replaces the finder with a ``Watcher``, which distinguishes an
import from a mere lookup.

No function in this module may raise an error or end a process, because an error would also break
pip and Ray's agents.
"""

import os
import sys

from .finders import Watcher
from .forks import Lock
from .names import ENTRY_POINTS, OFF, ON, VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

FIRST = "PrecisionShimStart"
"""Name of the class that ``zz_precision_shim.py`` puts into ``sys.meta_path``."""

_lock = Lock(patching=False)
_called = False
_waiting: "Watcher | None" = None


def init() -> None:
    """Install an import hook if the environment switches the shim on; once per process."""
    global _called, _waiting
    try:
        # A second thread that imports a framework waits here until the shim is in place.
        with _lock:
            value = os.environ.get(VARIABLE, "").strip().lower()
            if not value or value in OFF or _called:
                return
            _called = True  # a virtual environment executes its start-up files twice
            if not asked():
                say(
                    f"not installed: {VARIABLE}={value!r} is not a valid setting; allowed: "
                    f"{'/'.join(ON)} (on), strict, {'/'.join(OFF)} (off), or unset"
                )
                return
            watcher = Watcher(_wake, before=True)
            watcher.watch(_wake_words())
            _waiting = watcher
    except Exception as error:
        say(f"not installed: {error!r}")


def take_over(name: str, target: "ModuleType | None" = None) -> "ModuleSpec | None":
    """Replace the start-up file's finder with a ``Watcher``, which then looks up ``name``."""
    init()
    first = _first()
    if first is not None:
        # importlib is iterating over sys.meta_path: disable the finder, but leave it in the list.
        first.find_spec = lambda *_, **__: None
    return _waiting.find_spec(name, None, target) if _waiting is not None else None


def asked() -> bool:
    """Whether the environment switches the shim on, with a valid value."""
    return os.environ.get(VARIABLE, "").strip().lower() in (*ON, "strict")


def waiting() -> bool:
    """Whether this process waits for a framework's import."""
    return _waiting is not None or (not _called and _first() is not None and asked())


def stop() -> None:
    """Stop waiting for imports: the session waits from now on, or the shim was removed."""
    global _called, _waiting
    first = _first()
    if first is not None:
        _called = True
        sys.meta_path.remove(first)
    if _waiting is not None:
        _waiting.remove()
        _waiting = None


def _first() -> "Any":
    return next((finder for finder in sys.meta_path if type(finder).__name__ == FIRST), None)


def _wake_words() -> "set[str]":
    from . import carriers, registry

    names = registry.packages()
    # Start-up can watch for a third party's framework only if the user names it. For a framework
    # that the user does not name, the shim reads every distribution's entry points when torch is
    # imported. Reading the entry points takes 10 to 50 ms: little compared with importing torch,
    # but too much for a process without torch.
    named = os.environ.get(f"{VARIABLE}_FRAMEWORKS", "")
    names.update(name.strip().lower().replace("-", "_") for name in named.split(","))
    names.discard("")
    return names | {"torch", *carriers.PACKAGES}


def _wake(package: str) -> None:
    try:
        from . import carriers

        if package in carriers.PACKAGES:
            carriers.enter(package)
        elif package != "torch" or _third_parties():
            from . import session as _session

            _session.start()
    except (Exception, SystemExit) as error:
        say(f"not installed: {error!r}")


def _third_parties() -> bool:
    from importlib.metadata import entry_points

    return bool(entry_points(group=ENTRY_POINTS))


def say(line: str) -> None:
    """Write one line to stderr, not to ``logging``, which a framework may reconfigure later.

    If writing to stderr fails, the line is lost and no error is raised. Writing fails if stderr is
    ``None`` (under pythonw and some daemons), closed, or a file on a full disk.
    """
    try:
        if sys.stderr is not None:
            print(f"[precision_shim] {line}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass
