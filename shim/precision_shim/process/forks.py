"""Locks that stay usable after a fork: the forking thread acquires them before it forks.

Other threads' locks would stay locked in the child. A fork waits for them, at most ``PATIENCE``
seconds, because their thread may wait for an import in the forking one. If a lock is still held,
``interrupted`` makes the child undo incomplete patching.
"""

import _frozen_importlib
import os
import sys
import time
from _thread import RLock, get_ident  # RLock and get_ident, without importing threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

PATIENCE = 10.0
"""Maximum time that a fork waits for one lock, in seconds."""

interrupted = False
"""True only in a fork's child, if the fork interrupted patching; the child undoes that patching."""


class Lock:
    """A reentrant lock for ``with`` that exists until the process ends."""

    def __init__(self, *, patching: bool = True) -> None:
        """Make a lock that all later forks acquire; ``patching``: it is held to patch modules."""
        self._patching = patching
        self.patched: tuple[ModuleSpec | None, int] = None, 0
        """Spec of the last module that the import hook patched, and id of the importing thread."""
        if patching:
            # At a fork, the handler that was registered last runs first. An import under our lock
            # may need logging's lock, which a fork must therefore take after ours.
            import logging  # noqa: F401
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child
            )

    def _renew(self) -> None:
        self._lock = RLock()
        self._owner = self._forking = 0
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        # After a fork inside the ``with`` block, the child has a new lock, which is unlocked.
        if self._depth and self._owner == get_ident():
            self._depth -= 1
            self._lock.release()

    def _before(self) -> None:
        if self._lock.acquire(timeout=PATIENCE):
            self._forking = get_ident()
            self._let_import_end()

    def _let_import_end(self) -> None:
        # A child can never import a module that another thread was importing at the fork. An import
        # that waited for our patching is almost complete: wait up to 1 s for its thread.
        spec, thread = self.patched
        until = time.monotonic() + 1
        while getattr(spec, "_initializing", False) and thread != get_ident():
            if time.monotonic() > until:
                return
            time.sleep(0.0001)

    def _in_parent(self) -> None:
        if self._forking == get_ident():
            self._forking = 0
            self._lock.release()

    def _in_child(self) -> None:
        global interrupted
        taken = self._forking == get_ident() and not self._depth
        interrupted |= self._patching and not taken
        self._renew()


class Loading:
    """Counts the threads in its ``with`` block, for which a fork waits as for a ``Lock``.

    The threads do not exclude each other: one may wait for the other's import.
    """

    def __init__(self) -> None:
        """Register with all later forks."""
        self._threads: list[int] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before, after_in_child=self._in_child)

    def __enter__(self) -> None:
        self._threads.append(get_ident())

    def __exit__(self, *_: object) -> None:
        if get_ident() in self._threads:  # not after a fork inside the block
            self._threads.remove(get_ident())

    def _before(self) -> None:
        until = time.monotonic() + PATIENCE
        while not {*self._threads} <= {get_ident()} and time.monotonic() < until:
            time.sleep(0.0001)

    def _in_child(self) -> None:
        global interrupted
        interrupted |= bool(self._threads)
        self._threads.clear()


def is_cut_off(module: str) -> bool:
    """Whether a module's import never completes because its thread exists only in the parent."""
    # No public API shows which thread imports a module. Without _module_locks, return False.
    lock = getattr(_frozen_importlib, "_module_locks", {}).get(module, lambda: None)()
    owner = getattr(lock, "owner", None)
    return owner is not None and owner not in sys._current_frames()
