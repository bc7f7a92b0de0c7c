"""The seam engine: declare, check, wrap, undo, report. It knows no precision and no framework.

A newcomer's map: ``_records`` is what an adapter declares, ``_source`` looks at a symbol without
importing it, ``_wrapper`` is what stands in a wrapped symbol's place, ``_engine`` brings them
together. ``precision_shim._finders`` tells it when a module was imported.

The names below load on first use: not everything that needs a record needs wrapt.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._engine import Engine as Engine
    from ._records import Adapter as Adapter
    from ._records import NativeProbe as NativeProbe
    from ._records import Seam as Seam
    from ._source import Symbol as Symbol
    from ._source import look as look

_WHERE = {
    "Adapter": "_records",
    "Engine": "_engine",
    "NativeProbe": "_records",
    "Seam": "_records",
    "Symbol": "_source",
    "look": "_source",
}

__all__ = ["Adapter", "Engine", "NativeProbe", "Seam", "Symbol", "look"]


def __getattr__(name: str) -> object:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
