"""Predict how AReaL and ms-swift resume their checkpoints."""

from __future__ import annotations

import dataclasses

from precision_shim.adapting import versioned
from precision_shim_adapters.megatron import DISPATCH, GROUP

from . import megatron as resuming
from .layout import CheckpointPart, Outcome
from .prediction import Here


def areal(part: CheckpointPart, here: Here) -> Outcome:
    """Predict AReaL's resume; without the shim its optimizer keeps no remainders."""
    requested = resuming.assume_requested(part, here, f"{versioned('areal')}, megatron", "actor")
    if not here.in_force("areal", DISPATCH, GROUP):
        asked = {**requested.asked, "store_param_remainders": False}
        requested = dataclasses.replace(requested, asked=asked)
    return resuming.predict_resume("areal", part, here, requested)


def ms_swift(part: CheckpointPart, here: Here) -> Outcome:
    """Predict how a job with ms-swift's arguments in ``here.config`` would resume a checkpoint."""
    where = f"{versioned('ms-swift', 'swift')}, megatron's arguments"
    requested = resuming.assume_requested(part, here, where, "model")
    return resuming.predict_resume("ms-swift", part, here, requested)
