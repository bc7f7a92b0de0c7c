"""A real verl engine for ``test_contract.py``, which runs this file in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..every_framework.status_in_docs import tell
from .support import engine, optim_config


def test_worker(fused_adam: str, checkpoint: Path, shim: Any) -> None:
    shim(settings={"optimizer_states": "follow-model"})
    overrides = {"adam_beta2": 0.95, "exp_avg_dtype": "BF16"}
    optim = optim_config(override_optimizer_config=overrides)
    engine(checkpoint, "bfloat16", optim=optim).initialize()
    tell()
