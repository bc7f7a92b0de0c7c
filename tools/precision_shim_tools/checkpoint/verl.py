"""Predict how verl's jobs would resume their checkpoints."""

from __future__ import annotations

from precision_shim_adapters.verl import config as verls

from . import megatron as megatrons
from . import torch_fp16 as torchs
from .layout import CheckpointPart, Outcome
from .prediction import Here


def megatron(part: CheckpointPart, here: Here) -> Outcome:
    """Predict how a job with the optimizer fields in ``here.config`` resumes on Megatron."""
    fields, ddp = megatrons.assume_fields(part, here)
    fields.pop(verls.WORKERS, None)
    requested = verls.read_requested(
        {"override_optimizer_config": fields},
        ddp,
        subject=part.subject or "actor",
        declared=megatrons.find_params_dtype(part),
    )
    return megatrons.predict_resume("verl", part, here, requested)


def fsdp(part: CheckpointPart, here: Here) -> Outcome:
    """Predict how a job with 0.7's ``use_legacy_worker_impl`` in its config resumes on FSDP."""
    asked = (here.config or {}).get(verls.WORKERS)
    # A checkpoint whose directory names no model is from an SFT job, which uses only the engine.
    group = verls.LEGACY if part.subject and verls.is_legacy(asked) else verls.SHARDED.group
    return torchs.predict_resume("verl", part, here, group)


def distributed(part: CheckpointPart, here: Here) -> Outcome:
    """Predict a resume on the Automodel or torchtitan engine, with distributed checkpoints."""
    return torchs.predict_resume("verl", part, here, verls.AUTOMODEL.group)
