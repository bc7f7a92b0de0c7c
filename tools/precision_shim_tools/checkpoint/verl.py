"""Predict how verl's jobs would resume their checkpoints."""

from __future__ import annotations

from precision_shim_adapters.verl.training.engines import AUTOMODEL, GROUPS
from precision_shim_adapters.verl.training.fsdp import ENGINE, WORKERS, group_of
from precision_shim_adapters.verl.training.megatron import read_requested

from . import megatron as megatrons
from . import torch_fp16 as torchs
from .layout import CheckpointPart, Outcome
from .prediction import Here


def megatron(part: CheckpointPart, here: Here) -> Outcome:
    """Predict how a job with the optimizer fields in ``here.config`` resumes on Megatron."""
    fields, ddp = megatrons.assume_fields(part, here)
    fields.pop(WORKERS, None)
    requested = read_requested(
        {"override_optimizer_config": fields},
        ddp,
        subject=part.subject or "actor",
        declared=megatrons.find_params_dtype(part),
    )
    return megatrons.predict_resume("verl", part, here, requested)


def fsdp(part: CheckpointPart, here: Here) -> Outcome:
    """Predict how a job with 0.7's ``use_legacy_worker_impl`` in its config resumes on FSDP."""
    asked = (here.config or {}).get(WORKERS)
    # A checkpoint whose directory names no model is from an SFT job, which uses only the engine.
    group = group_of(asked) if part.subject else ENGINE
    return torchs.predict_resume("verl", part, here, group)


def distributed(part: CheckpointPart, here: Here) -> Outcome:
    """Predict a resume on the Automodel or torchtitan engine, with distributed checkpoints."""
    return torchs.predict_resume("verl", part, here, GROUPS[AUTOMODEL])
