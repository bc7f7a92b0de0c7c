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
    from .checkpoint import agree as agree
    from .checkpoint import load as load
    from .checkpoint import other_save as other_save
    from .checkpoint import save as save
    from .checkpoint import save_record as save_record
    from .record import BoundWhenPickled as BoundWhenPickled
    from .record import from_tensor as from_tensor
    from .record import record_of as record_of
    from .record import restore as restore
    from .record import to_tensor as to_tensor
    from .scaler import LossScaler as LossScaler
    from .skips import SkipCounter as SkipCounter
    from .skips import states_of_no_step as states_of_no_step

_WHERE = {
    "ScalerSettings": "..precision.scaler_record",
    "FILE_NAME": "..precision.scaler_record",
    "Files": ".checkpoint",
    "agree": ".checkpoint",
    "load": ".checkpoint",
    "other_save": ".checkpoint",
    "save": ".checkpoint",
    "save_record": ".checkpoint",
    "FORMAT": "..precision.scaler_record",
    "BoundWhenPickled": ".record",
    "ScalerRecord": "..precision.scaler_record",
    "from_tensor": ".record",
    "read_record": "..precision.scaler_record",
    "record_of": ".record",
    "restore": ".record",
    "to_tensor": ".record",
    "LossScaler": ".scaler",
    "MAX_SKIPS": "..precision.scaler_record",
    "SkipCounter": ".skips",
    "states_of_no_step": ".skips",
}

__all__ = list(_WHERE)

__getattr__, __dir__ = lazily(__name__, _WHERE)
