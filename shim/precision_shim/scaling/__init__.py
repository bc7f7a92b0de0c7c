"""Loss scaling for fp16: the scaler, its counters, and how its state is saved.

The modules of ``scaling`` need only torch, contain nothing specific to a framework, and patch
nothing.
"""

from __future__ import annotations

from ..precision.scaler_record import ScalerSettings
from .checkpoint import FILE_NAME, Files, agree, load, other_save, save, save_record
from .record import (
    FORMAT,
    BoundWhenPickled,
    ScalerRecord,
    from_tensor,
    read_record,
    record_of,
    restore,
    to_tensor,
)
from .scaler import LossScaler
from .skips import MAX_SKIPS, SkipCounter, states_of_no_step

__all__ = [
    "FILE_NAME",
    "FORMAT",
    "MAX_SKIPS",
    "BoundWhenPickled",
    "Files",
    "LossScaler",
    "ScalerRecord",
    "ScalerSettings",
    "SkipCounter",
    "agree",
    "from_tensor",
    "load",
    "other_save",
    "read_record",
    "record_of",
    "restore",
    "save",
    "save_record",
    "states_of_no_step",
    "to_tensor",
]
