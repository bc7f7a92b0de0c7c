"""Predict how NeMo-RL's jobs would resume their checkpoints."""

from __future__ import annotations

from precision_shim.precision.dtypes import name_of
from precision_shim_adapters.nemo_rl.config import FRAMEWORK, read_requested
from precision_shim_adapters.nemo_rl.training.workers import group_of

from . import megatron as megatrons
from . import torch_fp16 as torchs
from .layout import CheckpointPart, Outcome
from .prediction import Here

_SECOND = ("model", "optim")
"""Workers with ``dtensor_cfg._v2`` write these subdirectories of ``weights`` and ``optimizer``."""


def megatron(part: CheckpointPart, here: Here) -> Outcome:
    """Predict how a job with ``here.config`` as ``megatron_cfg.optimizer`` would resume."""
    fields, ddp = megatrons.assume_fields(part, here)
    config = {
        "precision": name_of(megatrons.find_params_dtype(part)),
        "megatron_cfg": {"optimizer": fields, "distributed_data_parallel_config": ddp},
    }
    requested = read_requested(config, part.subject or "policy", False, True)
    return megatrons.predict_resume(FRAMEWORK, part, here, requested)


def dtensor(part: CheckpointPart, here: Here) -> Outcome:
    """Predict the resume on DTensor; directory names show which kind of worker saved the files."""
    second = any(unit.path.name in _SECOND for unit in part.units)
    group = group_of(part.subject or "policy", second=second)
    return torchs.predict_resume(FRAMEWORK, part, here, group)
