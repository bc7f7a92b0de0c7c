"""Predict how verl's jobs would resume their checkpoints."""

from __future__ import annotations

from precision_shim.checkpoints.foretelling import Here
from precision_shim.checkpoints.layout import Outcome, Part

from ..fp16 import resuming as torchs
from ..megatron.resuming import foretelling as megatrons
from .engines import AUTOMODEL, GROUPS
from .fsdp import ENGINE, WORKERS, group_of
from .megatron import read_wishes


def megatron(part: Part, here: Here) -> Outcome:
    """Predict how a job with the optimizer fields in ``here.config`` resumes on Megatron."""
    fields = megatrons.assume_fields(part, here)
    fields.pop(WORKERS, None)
    bucket = {megatrons.BUCKET: fields.pop(megatrons.BUCKET)} if megatrons.BUCKET in fields else {}
    wishes = read_wishes(
        {"override_optimizer_config": fields},
        bucket,
        subject=part.subject or "actor",
        declared=megatrons.find_params_dtype(part),
    )
    return megatrons.foretell("verl", part, here, wishes)


def fsdp(part: Part, here: Here) -> Outcome:
    """Predict how a job with 0.7's ``use_legacy_worker_impl`` in its config resumes on FSDP."""
    asked = (here.config or {}).get(WORKERS)
    # A checkpoint whose directory names no model is from an SFT job, which uses only the engine.
    group = group_of(asked) if part.subject else ENGINE
    return torchs.foretell("verl", part, here, group)


def distributed(part: Part, here: Here) -> Outcome:
    """Predict a resume on the Automodel or torchtitan engine, with distributed checkpoints."""
    return torchs.foretell("verl", part, here, GROUPS[AUTOMODEL])
