"""What a resume makes of torchtitan's checkpoints."""

from __future__ import annotations

from precision_shim.checkpoints.foretelling import Here
from precision_shim.checkpoints.layout import Outcome, Part

from ..fp16 import resuming as torchs
from .places import PRETRAINING


def dcp(part: Part, here: Here) -> Outcome:
    """By torch's distributed checkpoint."""
    return torchs.foretell("torchtitan", part, here, PRETRAINING)
