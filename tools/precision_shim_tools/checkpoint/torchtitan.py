"""Predict how torchtitan's jobs would resume their checkpoints."""

from __future__ import annotations

from precision_shim_adapters.torchtitan.training.trainers import PRETRAINING, RL

from . import torch_fp16 as torchs
from .layout import CheckpointPart, Outcome
from .prediction import Here

_POLICYS = "train_state.policy_version"
"""A key in checkpoints of ``PolicyTrainer`` that is missing in checkpoints of ``Trainer``."""


def dcp(part: CheckpointPart, here: Here) -> Outcome:
    """Predict the resume; a checkpoint that has the key ``_POLICYS`` is from an RL job."""
    rl = any(_POLICYS in unit.tensors or _POLICYS in unit.objects for unit in part.units)
    return torchs.predict_resume("torchtitan", part, here, RL if rl else PRETRAINING)
