"""Loss scaling for fp16: the scaler, its counters, and how its state is saved.

The modules of ``scaling`` need only torch, contain nothing specific to a framework, and patch
nothing. Each name is loaded on first use: Megatron's scaler needs only ``skips``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazily

if TYPE_CHECKING:
    from .belonging import Files as Files
    from .checkpoint import BoundWhenPickled as BoundWhenPickled
    from .checkpoint import SaveAside as SaveAside
    from .checkpoint import files_of_rank as files_of_rank
    from .checkpoint import load as load
    from .checkpoint import raise_together as raise_together
    from .checkpoint import record_of as record_of
    from .checkpoint import restore as restore
    from .checkpoint import save as save
    from .checkpoint import to_tensor as to_tensor
    from .record import FILE_NAME as FILE_NAME
    from .record import ScalerRecord as ScalerRecord
    from .record import ScalerSettings as ScalerSettings
    from .record import read_record as read_record
    from .scaler import LossScaler as LossScaler
    from .skips import SkipCounter as SkipCounter
    from .skips import states_of_no_step as states_of_no_step

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
