"""What the start-up files call in every Python process of the environment: ``init()``.

The variable reaches every process of a cluster, pip and compile workers included, so this module
imports nothing that a bare interpreter has not loaded, and leaves everything else to the moment
when a framework is imported. A finder that waits for that costs 0.2 microseconds per import.

Nothing here raises, and nothing here ends a process: it would end pip and Ray's agents too.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

VARIABLE = "PRECISION_SHIM"
ON = ("1", "true", "on", "yes")
OFF = ("0", "false", "off", "no")
ENTRY_POINTS = "precision_shim.adapters"

PACKAGES = {
    "verl": ("verl",),
    "skyrl": ("skyrl",),
    "nemo-rl": ("nemo_rl",),
}
"""For each framework of ours the top-level packages whose import wakes its adapter. It stands here
and not in ``_registry``, because here it costs a start-up nothing."""


class Sleeper:
    """A ``sys.meta_path`` finder that calls back once, when a named package is first found."""

    finds_nothing = True  # looks of our own leave it out: they should wake nobody

    def __init__(self, callback: "Callable[[str], None]") -> None:
        """Make a sleeper that is not yet in place; the callback should raise nothing."""
        self._callback = callback
        self._names: set[str] = set()

    def watch(self, names: "Iterable[str]") -> None:
        """Add names of packages, and put the finder in place."""
        self._names.update(names)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Forget all names and leave ``sys.meta_path``."""
        self._names.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Call back, then let the other finders find the module."""
        if name not in self._names:
            return None
        self._names.discard(name)
        if self._others(name, path, target) is None:
            self._names.add(name)  # not installed: libraries look whether it is; that wakes nobody
            return None
        self._callback(name)
        # Once more, for finders that the callback put in front: importlib is past their place.
        return self._others(name, path, target)

    def _others(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


_called = False
_waiting: "Sleeper | None" = None


def init() -> None:
    """Wait for a framework's import, if the environment asks for it; a second call does nothing."""
    global _called, _waiting
    try:
        value = os.environ.get(VARIABLE, "").strip().lower()
        if not value or value in OFF or _called:
            return
        _called = True  # in a virtual environment start-up files are executed twice
        if not asked():
            _say(
                f"not installed: {VARIABLE}={value!r} is not a valid setting; allowed: "
                f"{'/'.join(ON)} (on), strict, {'/'.join(OFF)} (off), or unset"
            )
            return
        _waiting = Sleeper(_seen)
        _waiting.watch(_names())
    except Exception as error:
        _say(f"not installed: {error!r}")


def asked() -> bool:
    """Whether the environment asks for the shim, with a value that makes sense."""
    return os.environ.get(VARIABLE, "").strip().lower() in (*ON, "strict")


def waiting() -> bool:
    """Whether this process waits for a framework's import."""
    return _waiting is not None


def stop() -> None:
    """Wait no longer: the session has taken over, or the shim was taken out."""
    global _waiting
    if _waiting is not None:
        _waiting.remove()
        _waiting = None


def _names() -> "set[str]":
    names = {package for packages in PACKAGES.values() for package in packages}
    # A third party's framework is known by name only where the user names it. Otherwise it is
    # looked for when torch is imported: reading every distribution's entry points takes 10 to
    # 50 ms, which next to torch is nothing and in any other process would be everything.
    named = os.environ.get(f"{VARIABLE}_FRAMEWORKS", "")
    names.update(name.strip().lower().replace("-", "_") for name in named.split(","))
    names.discard("")
    return names | {"torch", "ray"}


def _seen(package: str) -> None:
    try:
        if package == "ray":
            from . import _ray

            _ray.enter()
        elif package != "torch" or _third_parties():
            from . import _session

            _session.start()
    except (Exception, SystemExit) as error:
        _say(f"not installed: {error!r}")


def _third_parties() -> bool:
    from importlib.metadata import entry_points

    return bool(entry_points(group=ENTRY_POINTS))


def _say(line: str) -> None:
    # As _journal.say, without its imports; stderr is None under pythonw and some daemons.
    if sys.stderr is not None:
        print(f"[precision_shim] {line}", file=sys.stderr, flush=True)
