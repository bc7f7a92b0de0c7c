"""Start-up: an import hook in a process whose environment switches the shim on.

When Python searches for a framework's package, ``zz_precision_shim.py`` calls ``take_over()``. No
function in this module may raise an error or end a process, because every process of a cluster may
inherit ``PRECISION_SHIM``: an error would also break pip, compile workers and Ray's agents.
"""

import os

from . import standby
from .finders import Watcher
from .forks import Lock
from .names import ENTRY_POINTS, OFF, ON, VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_lock = Lock(patching=False)


def init() -> None:
    """Install an import hook if the environment switches the shim on; once per process."""
    try:
        # A second thread that imports a framework waits here until the shim is in place.
        with _lock:
            value = os.environ.get(VARIABLE, "").strip().lower()
            if not value or value in OFF or standby.called:
                return
            standby.called = True  # a virtual environment executes its start-up files twice
            if not standby.asked():
                standby.say(
                    f"not installed: {VARIABLE}={value!r} is not a valid setting; allowed: "
                    f"{'/'.join(ON)} (on), strict, {'/'.join(OFF)} (off), or unset"
                )
                return
            watcher = Watcher(_wake, before=True)
            watcher.watch(_wake_words())
            standby.watcher = watcher
    except Exception as error:
        standby.say(f"not installed: {error!r}")


def take_over(name: str, target: "ModuleType | None" = None) -> "ModuleSpec | None":
    """Replace the start-up file's finder with a ``Watcher``, which then looks up ``name``."""
    init()
    first = standby.first_finder()
    if first is not None:
        # importlib is iterating over sys.meta_path: disable the finder, but leave it in the list.
        first.find_spec = lambda *_, **__: None
    return None if standby.watcher is None else standby.watcher.find_spec(name, None, target)


def _wake_words() -> "set[str]":
    from . import registry

    names = registry.packages()
    # For a third party's framework that the user does not name, the shim reads all entry points
    # when torch is imported, which takes 10 to 50 ms: too much for a process without torch.
    named = os.environ.get(f"{VARIABLE}_FRAMEWORKS", "")
    names.update(name.strip().lower().replace("-", "_") for name in named.split(","))
    names.discard("")
    return names | {"torch", "ray"}


def _wake(package: str) -> None:
    try:
        if package == "ray":
            from .carriers import ray

            ray.enter()
        elif package != "torch" or _third_parties():
            from . import session as _session

            _session.start()
    except (Exception, SystemExit) as error:
        standby.say(f"not installed: {error!r}")


def _third_parties() -> bool:
    from importlib.metadata import entry_points

    return bool(entry_points(group=ENTRY_POINTS))
