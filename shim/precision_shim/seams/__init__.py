"""The seam engine declares, checks, applies, undoes and reports patches of any framework.

The seam engine contains nothing specific to precision or to a framework. An adapter marks its
functions with the decorator ``seam``, which ``_seam`` defines. A marked function receives a
``Call``, defined in ``_call``, and the symbol's arguments. ``_source`` describes a symbol from
source code, without an import; ``_plan`` decides by these descriptions which symbols to patch.
``_wrapper`` defines the object that replaces a wrapped symbol; ``_sites`` stores the patched
symbols and undoes the patches. ``_engine`` combines all other modules of this package.

This file does not import ``_engine``: code that only reads seams does not import wrapt.
"""

from ._call import Call, around
from ._plan import check, is_there
from ._seam import NativeProbe, Seam, collect, seam
from ._source import Symbol, look

__all__ = [
    "Call",
    "NativeProbe",
    "Seam",
    "Symbol",
    "around",
    "check",
    "collect",
    "is_there",
    "look",
    "seam",
]
