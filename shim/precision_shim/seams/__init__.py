"""The seam engine declares, checks, applies, undoes and reports patches of any framework.

It contains nothing specific to precision or to a framework. ``_seam`` declares, ``_source`` and
``_plan`` check, ``_call`` and ``_wrapper`` wrap, ``_sites`` patches, ``_engine`` combines them.
This file does not import ``_engine``: code that only reads seams does not import wrapt.
"""

from ._call import Call, around
from ._plan import check, is_there
from ._seam import NativeProbe, Seam, collect, seam
from ._source import Symbol, definition, find_spec, look

__all__ = [
    "Call",
    "NativeProbe",
    "Seam",
    "Symbol",
    "around",
    "check",
    "collect",
    "definition",
    "find_spec",
    "is_there",
    "look",
    "seam",
]
