"""What a resume makes of verl's checkpoints."""

from __future__ import annotations

from precision_shim.checkpoints.foretelling import Here
from precision_shim.checkpoints.layout import Outcome, Part

from ..fp16 import resuming as torchs
from ..megatron.resuming import foretelling as megatrons
from .fsdp import ENGINE, WORKERS, group_of
from .megatron import read_wishes


def megatron(part: Part, here: Here) -> Outcome:
    """On Megatron; the config's fields are those of ``override_optimizer_config``."""
    fields = megatrons.assumed(part, here)
    fields.pop(WORKERS, None)
    bucket = {megatrons.BUCKET: fields.pop(megatrons.BUCKET)} if megatrons.BUCKET in fields else {}
    wishes = read_wishes(
        {"override_optimizer_config": fields},
        bucket,
        subject=part.subject or "actor",
        declared=megatrons.declared(part),
    )
    return megatrons.foretell("verl", part, here, wishes)


def fsdp(part: Part, here: Here) -> Outcome:
    """On FSDP; the config's ``use_legacy_worker_impl`` is that of verl 0.7's ``trainer``."""
    asked = (here.config or {}).get(WORKERS)
    # A PPO job's directories bear the models' names; SFT has one model, on verl's engine.
    group = group_of(asked) if part.subject else ENGINE
    return torchs.foretell("verl", part, here, group)
