"""A finder that calls a function before or after the code of an imported module runs.

``wrapt.register_post_import_hook`` is not used: importing wrapt takes 17 to 65 ms, too long for
Ray's agents, which also run this finder; a hook that is registered while a ``find_spec`` searches
for the hook's module is never called; and wrapt's finder cannot be removed.
"""

import sys
from _thread import _local  # the class threading.local, without importing threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
else:
    Loader = object


def take_out(finder: "object") -> None:
    """Remove a finder from ``sys.meta_path``, if it is there.

    ``sys.meta_path`` becomes another list: another thread's import may be iterating over the old
    one, and would pass over a finder.
    """
    finders = sys.meta_path.copy()
    if finder in finders:
        finders.remove(finder)
        sys.meta_path = finders


class Watcher:
    """A ``sys.meta_path`` finder that reports imports of named modules and finds no module itself.

    A mere lookup is not reported, except of a namespace package, with ``before``.
    """

    finds_nothing = True  # find_spec() of the seam engine skips finders with this attribute

    def __init__(self, callback: "Callable[[str], None]", *, before: bool = False) -> None:
        """Make a watcher that is not yet in ``sys.meta_path``.

        Args:
            callback: called with the module's name; its errors reach the code that imports.
            before: whether to call ``callback`` once per name, before the module exists, which
                ``callback`` may import itself; otherwise, each time after the module's code ran.
        """
        self.callback = callback
        self.before = before
        self._names: set[str] = set()
        self._busy = _local()

    def watch(self, names: "Iterable[str]") -> None:
        """Add module names; put this finder first in ``sys.meta_path`` if it is not there yet."""
        self._names.update(names)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Drop all names, and take this finder out of ``sys.meta_path``."""
        self._names.clear()
        take_out(self)

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Search all finders except this one; make the module's loader run the callback."""
        if name not in self._names:
            return None
        spec = self.find_elsewhere(name, path, target)
        if spec is None:
            return None
        if spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = (_Before if self.before else _After)(spec.loader, self, path)
        elif self.before and self.take(name):  # a namespace package, which has no code to run
            self.callback(name)
            return self.find_elsewhere(name, path, target)
        return spec

    def find_elsewhere(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Search all finders except this; return ``None`` in a nested search for the same name."""
        busy: set[str] = self._busy.__dict__.setdefault("names", set())
        if name in busy:
            return None
        busy.add(name)
        try:
            for finder in list(sys.meta_path):
                if finder is not self and hasattr(finder, "find_spec"):
                    spec = finder.find_spec(name, path, target)
                    if spec is not None:
                        return spec
            return None
        finally:
            busy.discard(name)

    def take(self, name: str) -> bool:
        """Stop watching a name; return whether the name was watched."""
        if name not in self._names:
            return False
        self._names.discard(name)
        return True


class _Calling(Loader):
    """Wraps a module's loader, and restores the original loader before the module's code runs."""

    def __init__(self, loader: "Loader", watcher: Watcher, path: "Sequence[str] | None") -> None:
        self._loader = loader
        self._watcher = watcher
        self._path = path

    def __getattr__(self, name: str) -> "object":
        return getattr(self._loader, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self._loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        self._loader.exec_module(module)


class _After(_Calling):
    def exec_module(self, module: "ModuleType") -> None:
        super().exec_module(module)
        self._watcher.callback(module.__name__)


class _Before(_Calling):
    _there: "tuple[ModuleType, ModuleSpec | None] | None" = None

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        watcher, name = self._watcher, spec.name
        if watcher.take(name):
            watcher.callback(name)
            module = sys.modules.get(name)
            if module is not None:
                # The callback has imported the module. Return this module, because importlib does
                # not search sys.modules again and would run the module's code a second time.
                self._there = module, module.__spec__
                return module
            # Search again: importlib would skip finders that the callback inserted at the front.
            found = watcher.find_elsewhere(name, self._path)
            if found is not None and hasattr(found.loader, "exec_module"):
                self._loader = found.loader  # type: ignore[assignment]
        return self._loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        if self._there is None or self._there[0] is not module:
            super().exec_module(module)
        else:
            module.__spec__ = self._there[1]
