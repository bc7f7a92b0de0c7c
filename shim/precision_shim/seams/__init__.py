"""The seam engine: declare, check, wrap, undo, report. It knows no precision and no framework.

A newcomer's map: ``_records`` is what an adapter declares, ``_source`` looks at a symbol without
importing it, ``_imports`` tells when a module was imported, ``_wrapper`` is what stands in a
wrapped symbol's place, ``_engine`` brings them together.
"""

from ._engine import Engine
from ._records import Adapter, NativeProbe, Seam
from ._source import Symbol, look

__all__ = ["Adapter", "Engine", "NativeProbe", "Seam", "Symbol", "look"]
