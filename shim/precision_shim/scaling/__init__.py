"""Loss scaling for fp16: the scaler, its counters, and how its state is saved.

The modules of ``scaling`` need only torch, contain nothing specific to a framework, and patch
nothing. Each name is loaded on first use: Megatron's scaler needs only ``skips``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazily

if TYPE_CHECKING:
    from .belonging import *  # noqa: F403
    from .checkpoint import *  # noqa: F403
    from .record import *  # noqa: F403
    from .scaler import *  # noqa: F403
    from .skips import *  # noqa: F403

_NAMES = {
    ".belonging": "Files",
    ".checkpoint": "BoundWhenPickled SaveAside files_of_rank load "
    "raise_together record_of restore save to_tensor",
    ".record": "FILE_NAME ScalerRecord ScalerSettings read_record",
    ".scaler": "LossScaler",
    ".skips": "SkipCounter states_of_no_step",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_WHERE)

__getattr__, __dir__ = lazily(__name__, _WHERE)
