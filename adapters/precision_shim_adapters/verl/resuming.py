"""What a resume makes of verl's checkpoints."""

from __future__ import annotations

from precision_shim.checkpoints.foretelling import Here
from precision_shim.checkpoints.layout import Outcome, Part

from ..fp16 import resuming as torchs
from ..megatron import resuming as megatrons
from .megatron import read_wishes


def megatron(part: Part, here: Here) -> Outcome:
    """On Megatron; the config's fields are those of ``override_optimizer_config``."""
    fields = megatrons.assumed(part, here)
    bucket = {megatrons.BUCKET: fields.pop(megatrons.BUCKET)} if megatrons.BUCKET in fields else {}
    wishes = read_wishes(
        {"override_optimizer_config": fields},
        bucket,
        subject=part.subject or "actor",
        declared=megatrons.declared(part),
    )
    return megatrons.foretell("verl", part, here, wishes)


def fsdp(part: Part, here: Here) -> Outcome:
    """On FSDP."""
    return torchs.foretell("verl", part, here, "fsdp engine")
