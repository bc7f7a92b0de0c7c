"""Tell when a module was imported: a small finder that calls back after the module's code ran.

Our own, and not ``wrapt.register_post_import_hook``, for three reasons: it stands in processes that
should not pay for wrapt (17 to 65 ms each), such as Ray's agents; a hook registered from within a
``find_spec`` never fires for that first module; and it can be taken out without a trace.
"""

import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
else:
    Loader = object


class Watcher:
    """A ``sys.meta_path`` finder that reports imports of named modules and finds none itself."""

    finds_nothing = True  # for a look at specs that should pass us by

    def __init__(self, callback: "Callable[[str], None]") -> None:
        """Make a watcher that is not yet in place.

        Args:
            callback: called with the module's name; its exceptions are the caller's, so it
                should raise none.
        """
        self._callback = callback
        self._names: set[str] = set()
        self._busy = threading.local()

    def watch(self, names: "Iterable[str]") -> None:
        """Add module names, and put the finder in place."""
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
        """Let the other finders find the module; see to it that the callback runs."""
        if name not in self._names:
            return None
        busy: set[str] = self._busy.__dict__.setdefault("names", set())
        if name in busy:
            return None
        busy.add(name)
        try:
            for finder in list(sys.meta_path):
                if finder is self or not hasattr(finder, "find_spec"):
                    continue
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                        spec.loader = _CallingLoader(spec.loader, self._callback)
                    return spec
            return None
        finally:
            busy.discard(name)


class _CallingLoader(Loader):
    """Stands in for a module's loader until the module's code has run, then is gone."""

    def __init__(self, loader: "Loader", callback: "Callable[[str], None]") -> None:
        self._loader = loader
        self._callback = callback

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
        self._callback(module.__name__)
