"""Predict how SkyRL's jobs would resume their checkpoints."""

from __future__ import annotations

from precision_shim.checkpoints.foretelling import Here
from precision_shim.checkpoints.layout import Outcome, Part

from ..fp16 import resuming as torchs
from ..megatron.deciding.wishes import Wishes
from ..megatron.resuming import foretelling as megatrons
from .config import KWARGS
from .fsdp import GROUP


def megatron(part: Part, here: Here) -> Outcome:
    """The outcome on Megatron; ``here.config`` has fields of ``optimizer_config_kwargs``."""
    fields = megatrons.assume_fields(part, here)
    bucket = fields.pop(megatrons.BUCKET, None)
    wishes = Wishes(
        where=f"skyrl, {KWARGS}",
        subject=part.subject or "policy",
        asked=fields,
        declared=megatrons.find_params_dtype(part),
        bucket_in_fp32=None if bucket is None else bool(bucket),
    )
    return megatrons.foretell("skyrl", part, here, wishes, mends_offload=True)


def fsdp(part: Part, here: Here) -> Outcome:
    """The outcome on FSDP."""
    return torchs.foretell("skyrl", part, here, GROUP)
