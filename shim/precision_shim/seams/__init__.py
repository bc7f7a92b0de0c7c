"""The seam engine: declare, check, wrap, undo, report. It knows no precision and no framework.

A newcomer's map. An adapter marks its functions with ``seam`` (``_seam``); a function gets a
``Call`` and the arguments that it names (``_call``). ``_source`` looks at a symbol and imports
nothing, into what is installed or into a wheel or folder (``_trees``); ``_digest`` and ``_changes``
tell its code from another's; ``_plan`` makes of records and source what would be done. ``_probe``
asks whether what the rules assume still holds. ``_finders`` tells when a module
was imported, ``_wrapper`` is what stands in a wrapped symbol's place, ``_sites`` holds the places,
the layers over them and the way back. ``_engine`` ties them together.

The names below load on first use: not everything that needs a record needs wrapt.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._call import Call as Call
    from ._call import around as around
    from ._engine import Engine as Engine
    from ._plan import Plan as Plan
    from ._plan import check as check
    from ._probe import Answer as Answer
    from ._probe import probe as probe
    from ._seam import Adapter as Adapter
    from ._seam import NativeProbe as NativeProbe
    from ._seam import Seam as Seam
    from ._seam import collect as collect
    from ._seam import seam as seam
    from ._source import Symbol as Symbol
    from ._source import look as look

_WHERE = {
    "Adapter": "_seam",
    "Answer": "_probe",
    "Call": "_call",
    "Engine": "_engine",
    "NativeProbe": "_seam",
    "Plan": "_plan",
    "Seam": "_seam",
    "Symbol": "_source",
    "around": "_call",
    "check": "_plan",
    "collect": "_seam",
    "look": "_source",
    "probe": "_probe",
    "seam": "_seam",
}

__all__ = [
    "Adapter",
    "Answer",
    "Call",
    "Engine",
    "NativeProbe",
    "Plan",
    "Seam",
    "Symbol",
    "around",
    "check",
    "collect",
    "look",
    "probe",
    "seam",
]


def __getattr__(name: str) -> object:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
