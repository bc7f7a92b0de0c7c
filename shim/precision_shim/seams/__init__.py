"""The seam engine declares, checks, applies, undoes and reports patches of any framework.

The seam engine contains nothing specific to precision or to a framework. An adapter marks its
functions with the decorator ``seam``, which ``_seam`` defines. A marked function receives a
``Call``, defined in ``_call``, and the symbol's arguments. ``_source`` describes a symbol from
source code, without an import; ``_plan`` decides by these descriptions which symbols to patch.
``_wrapper`` defines the object that replaces a wrapped symbol; ``_sites`` stores the patched
symbols and undoes the patches. ``_engine`` combines all other modules of this package.
``precision_shim_tools.upstream`` reports the changes in a framework's release.

Each name in ``__all__`` is loaded on first use: code that only reads seams does not import wrapt.
"""

from .._lazy import lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._call import Call as Call
    from ._call import around as around
    from ._engine import SeamEngine as SeamEngine
    from ._plan import SeamPlan as SeamPlan
    from ._plan import check as check
    from ._plan import is_there as is_there
    from ._seam import NativeProbe as NativeProbe
    from ._seam import Seam as Seam
    from ._seam import collect as collect
    from ._seam import seam as seam
    from ._source import Symbol as Symbol
    from ._source import look as look

_WHERE = {
    "Call": "._call",
    "SeamEngine": "._engine",
    "NativeProbe": "._seam",
    "SeamPlan": "._plan",
    "Seam": "._seam",
    "Symbol": "._source",
    "around": "._call",
    "check": "._plan",
    "is_there": "._plan",
    "collect": "._seam",
    "look": "._source",
    "seam": "._seam",
}

__all__ = list(_WHERE)
__getattr__, __dir__ = lazily(__name__, _WHERE)
