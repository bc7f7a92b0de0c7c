"""verl's FSDP engine on generated configs; ``processes/rank_server.py`` starts its process."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch

import precision_shim
from precision_shim.precision.dtypes import name_of

from ..plan.verdicts import Drawn, Verdict, by_worker, of_audit
from ..processes.rank_server import Launch, look_ahead
from . import fsdp_support
from .verdict_lines import ON_FSDP, actor_of, line


def prepare() -> None:
    """Import verl in the server."""
    fsdp_support.prepare()
    look_ahead("verl")


def run(launch: Launch) -> list[dict[str, Any]]:
    """The engine's verdicts on the launch's configs, in the configs' order."""
    launch.join()
    drawn = [Drawn(**one) for one in launch.options["drawn"]]
    return [asdict(by_worker(lambda one=one: _built(one), one)) for one in drawn]


def _built(drawn: Drawn) -> Verdict:
    """The verdict of verl's FSDP engine after one step on made-up gradients."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    role = actor_of(line(drawn, *ON_FSDP))
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=os.environ["MODEL"],
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
