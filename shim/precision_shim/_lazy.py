"""Loads the names of a package on first use."""

import sys

TYPE_CHECKING = False  # replaces typing.TYPE_CHECKING: importing typing would take 2 ms
if TYPE_CHECKING:
    from collections.abc import Callable


def lazily(
    package: str, where: dict[str, str]
) -> "tuple[Callable[[str], object], Callable[[], list[str]]]":
    """Return a package's ``__getattr__`` and ``__dir__``; ``where`` maps names to modules."""

    def get(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(where[name], package), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *where})
