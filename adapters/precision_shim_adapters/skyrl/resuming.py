"""Predict how SkyRL's jobs would resume their checkpoints."""

from __future__ import annotations

from precision_shim.checkpoints.foretelling import Here
from precision_shim.checkpoints.layout import Outcome, Part

from ..fp16 import resuming as torchs
from ..megatron.resuming import foretelling as megatrons
from .config import KWARGS
from .fsdp import GROUP


def megatron(part: Part, here: Here) -> Outcome:
    """Predict how a job with ``optimizer_config_kwargs`` in ``here.config`` resumes on Megatron."""
    wishes = megatrons.assume_wishes(part, here, f"skyrl, {KWARGS}", part.subject or "policy")
    return megatrons.foretell("skyrl", part, here, wishes, mends_offload=True)


def fsdp(part: Part, here: Here) -> Outcome:
    """Predict the resume on FSDP."""
    return torchs.foretell("skyrl", part, here, GROUP)
