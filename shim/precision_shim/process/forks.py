"""Locks that a fork leaves usable: whoever forks takes them first, as with the lock of ``logging``.

The child of a fork has one thread. What the others were doing there stays half done for ever, and
the locks that they held stay held. So a fork waits until no other thread holds one of ours. Two
cases are left: the other thread goes on for too long (it may itself wait for an import that the
forking thread is in), or the forking thread itself holds the lock. In both the child gets a new
lock, and ``interrupted`` tells it that something is half done there.
"""

import os
import time
from _thread import RLock, get_ident  # the names of threading, without the import of threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

PATIENCE = 10.0
"""Seconds that a fork waits for one lock at most."""

interrupted = False
"""In the child of a fork: whether the patching was under way, and is to be taken out there."""


class Lock:
    """A reentrant lock for ``with``, as long as the process lives."""

    def __init__(self, *, patching: bool = True) -> None:
        """Make a lock that every fork takes from now on: ``os`` gives no handler back.

        Args:
            patching: whether it is held while modules are imported and patched.
        """
        self._patching = patching
        self.patched: tuple[ModuleSpec | None, int] = None, 0
        """The module that was patched last, within its import, and the thread that imports it."""
        if patching:
            # What registered last is asked first. An import under our lock may need logging's: a
            # fork that held logging's and waited for ours would wait in vain.
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
        # In the child of a fork that was made within, the lock is another one by now.
        if self._depth and self._owner == get_ident():
            self._depth -= 1
            self._lock.release()

    def _before(self) -> None:
        if self._lock.acquire(timeout=PATIENCE):
            self._forking = get_ident()
            self._let_import_end()

    def _let_import_end(self) -> None:
        # Python keeps a child from what another thread was importing, for ever. Nothing is left to
        # do of the import that was held up for our patching, but that thread has to get to it.
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
