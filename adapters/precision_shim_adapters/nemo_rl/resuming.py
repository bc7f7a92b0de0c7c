"""Predict how NeMo-RL's jobs would resume their checkpoints."""

from __future__ import annotations

from precision_shim.checkpoints.foretelling import Here
from precision_shim.checkpoints.layout import Outcome, Part
from precision_shim.precision.dtypes import name_of

from ..fp16 import resuming as torchs
from ..megatron.resuming import foretelling as megatrons
from .dtensor import FRAMEWORK, group_of
from .megatron import read_wishes

_SECOND = ("model", "optim")
"""Workers with ``dtensor_cfg._v2`` write these subdirectories of ``weights`` and ``optimizer``."""


def megatron(part: Part, here: Here) -> Outcome:
    """Predict how a job with ``here.config`` as ``megatron_cfg.optimizer`` would resume."""
    fields = megatrons.assume_fields(part, here)
    ddp = {megatrons.BUCKET: fields.pop(megatrons.BUCKET)} if megatrons.BUCKET in fields else {}
    config = {
        "precision": name_of(megatrons.find_params_dtype(part)),
        "megatron_cfg": {"optimizer": fields, "distributed_data_parallel_config": ddp},
    }
    wishes = read_wishes(config, part.subject or "policy", False, True)
    return megatrons.foretell(FRAMEWORK, part, here, wishes)


def dtensor(part: Part, here: Here) -> Outcome:
    """Predict the resume on DTensor; directory names show which kind of worker saved the files."""
    second = any(unit.path.name in _SECOND for unit in part.units)
    group = group_of(part.subject or "policy", second=second)
    return torchs.foretell(FRAMEWORK, part, here, group)
