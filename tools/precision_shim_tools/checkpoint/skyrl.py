"""Predict how SkyRL's jobs would resume their checkpoints."""

from __future__ import annotations

from precision_shim_adapters.skyrl.config import FSDP, KWARGS

from . import megatron as megatrons
from . import torch_fp16 as torchs
from .layout import CheckpointPart, Outcome
from .prediction import Here


def megatron(part: CheckpointPart, here: Here) -> Outcome:
    """Predict how a job with ``optimizer_config_kwargs`` in ``here.config`` resumes on Megatron."""
    requested = megatrons.assume_requested(part, here, f"skyrl, {KWARGS}", part.subject or "policy")
    return megatrons.predict_resume("skyrl", part, here, requested, mends_offload=True)


def fsdp(part: CheckpointPart, here: Here) -> Outcome:
    """Predict the resume on FSDP."""
    return torchs.predict_resume("skyrl", part, here, FSDP)
