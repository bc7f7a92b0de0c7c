"""A case of ``fsdp_ranks.py``: verl's FSDP engine on generated configs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

import precision_shim
from precision_shim.precision.dtypes import name_of

from ..plan.verdicts import Drawn, Verdict, by_worker, of_audit
from .fsdp_ranks import Job, case
from .verdict_lines import ON_FSDP, actor_of, line


@case
def verdicts(job: Job, drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The engine's verdicts on the configs, in their order."""
    asked = [Drawn(**one) for one in drawn]
    return [asdict(by_worker(lambda one=one: _built(job, one), one)) for one in asked]


def _built(job: Job, drawn: Drawn) -> Verdict:
    """The verdict of verl's FSDP engine after one step on made-up gradients."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    role = actor_of(line(drawn, *ON_FSDP))
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=job.model,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
        ),
        role.engine,
        role.optim,
        CheckpointConfig(save_contents=[], load_contents=[]),
    )
    engine.initialize()
    for one in engine.module.parameters():
        one.grad = torch.ones_like(one)
    engine.optimizer_step()
    scaler = engine.scaler
    audit = precision_shim.audit(engine.module, engine.optimizer).to_dict()
    return Verdict(
        computes=name_of(engine._autocast_dtype),
        scale=None if scaler is None else float(scaler.get_scale()),
        held=of_audit(audit),
    )
