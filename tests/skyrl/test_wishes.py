"""The table of wishes on SkyRL's own config: one plan for each, as in every framework."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from precision_shim_adapters.skyrl.megatron import of_worker

from ..wishes import Case, each_case, expected, outcome_in
from .support import megatron_worker

CONFIG = "trainer.policy.megatron_config"


@each_case
def test_the_table(fused_adam: str, shim: Any, checkpoints: dict[str, Path], case: Case) -> None:
    shim(settings=case.settings)
    written = [
        f"{CONFIG}.optimizer_config_kwargs.{key}={value}" for key, value in case.asked.items()
    ]
    if case.bucket is not None:
        written.append(f"{CONFIG}.ddp_config.grad_reduce_in_fp32={str(case.bucket).lower()}")
    dtype = str(case.dtype).removeprefix("torch.")
    worker = megatron_worker(
        checkpoints[dtype],
        f"trainer.bf16={str(dtype == 'bfloat16').lower()}",
        "trainer.policy.optimizer_config.adam_betas=[0.9,0.95]",
        *written,
    )
    worker.provider = SimpleNamespace(mtp_num_layers=None)  # which init_configs makes
    wishes = of_worker(worker, worker.cfg.policy.megatron_config.ddp_config)
    assert outcome_in("skyrl", case, wishes) == expected(case)
