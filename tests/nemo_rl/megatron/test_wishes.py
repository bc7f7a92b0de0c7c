"""The table of wishes on NeMo-RL's own policy config: one plan for each, as in every framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from precision_shim_adapters.nemo_rl.megatron import read_wishes

from ...wishes import Case, each_case, expected, outcome_in
from .support import OPTIMIZER, policy_config

OPEN = ("bf16", "fp16", "params_dtype", "use_precision_aware_optimizer", "adam_beta2")
"""What the shipped files carry and the table leaves open where it does not name it."""


@each_case
def test_the_table(fused_adam: str, shim: Any, model: Path, case: Case) -> None:
    shim(settings=case.settings)
    assert set(OPEN) <= set(OPTIMIZER)
    precision = str(case.dtype).removeprefix("torch.")
    config = policy_config(model, precision, drop=OPEN, optimizer=dict(case.asked))
    ddp = config["megatron_cfg"]["distributed_data_parallel_config"]
    del ddp["grad_reduce_in_fp32"]
    if case.bucket is not None:
        ddp["grad_reduce_in_fp32"] = case.bucket
    wishes = read_wishes(config, "policy", megatron_fsdp=False, trains=True)
    assert outcome_in("nemo-rl", case, wishes) == expected(case)
