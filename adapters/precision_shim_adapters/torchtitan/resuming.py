"""Predict how torchtitan's jobs would resume their checkpoints."""

from __future__ import annotations

from precision_shim.checkpoints.foretelling import Here
from precision_shim.checkpoints.layout import Outcome, Part

from ..fp16 import resuming as torchs
from .places import PRETRAINING, RL

_POLICYS = "train_state.policy_version"
"""A key in checkpoints of ``PolicyTrainer`` that is missing in checkpoints of ``Trainer``."""


def dcp(part: Part, here: Here) -> Outcome:
    """Predict the resume; a checkpoint that has the key ``_POLICYS`` is from an RL job."""
    rl = any(_POLICYS in unit.tensors or _POLICYS in unit.objects for unit in part.units)
    return torchs.foretell("torchtitan", part, here, RL if rl else PRETRAINING)
