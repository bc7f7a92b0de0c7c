"""The loss scaler and its record in a checkpoint: what an adapter may import of both."""

from __future__ import annotations

from ..files.metadata import METADATA, read_metadata
from ..scaling import (
    FILE_NAME,
    Files,
    LossScaler,
    SaveAside,
    ScalerSettings,
    files_of_rank,
    raise_together,
    states_of_no_step,
)

__all__ = ["FILE_NAME", "METADATA", "Files", "LossScaler", "SaveAside", "ScalerSettings"]
__all__ += ["files_of_rank", "raise_together", "read_metadata", "states_of_no_step"]
