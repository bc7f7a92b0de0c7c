"""Loss scaling for fp16: the scaler, its counters, and how its state is saved.

The modules of ``scaling`` need only torch, contain nothing specific to a framework, and patch
nothing. Each name is loaded on first use: Megatron's own scaler needs only ``skips``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazily

if TYPE_CHECKING:
    from ..precision.scaler_record import FILE_NAME as FILE_NAME
    from ..precision.scaler_record import FORMAT as FORMAT
    from ..precision.scaler_record import MAX_SKIPS as MAX_SKIPS
    from ..precision.scaler_record import ScalerRecord as ScalerRecord
    from ..precision.scaler_record import ScalerSettings as ScalerSettings
    from ..precision.scaler_record import read_record as read_record
    from .checkpoint import Files as Files
    from .checkpoint import SaveAside as SaveAside
    from .checkpoint import agree as agree
    from .checkpoint import load as load
    from .checkpoint import other_save as other_save
    from .checkpoint import save as save
    from .record import BoundWhenPickled as BoundWhenPickled
    from .record import from_tensor as from_tensor
    from .record import record_of as record_of
    from .record import restore as restore
    from .record import to_tensor as to_tensor
    from .scaler import LossScaler as LossScaler
    from .skips import SkipCounter as SkipCounter
    from .skips import states_of_no_step as states_of_no_step

_NAMES = {
    "..precision.scaler_record": "FILE_NAME FORMAT MAX_SKIPS ScalerRecord ScalerSettings "
    "read_record",
    ".checkpoint": "Files SaveAside agree load other_save save",
    ".record": "BoundWhenPickled from_tensor record_of restore to_tensor",
    ".scaler": "LossScaler",
    ".skips": "SkipCounter states_of_no_step",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_WHERE)

__getattr__, __dir__ = lazily(__name__, _WHERE)
