"""On the same generated configs, the plan and verl's own engines come to the same verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from ..every_framework.newest import on_the_newest
from ..plan import verdicts
from ..plan.remedies import hold as hold_remedies
from ..plan.verdicts import Drawn, Key, Verdict, agree, by_worker, draw, hold, of_plan, singles
from ..processes.rank_server import Ranks
from .support import CPU_FIELDS
from .verdict_lines import ACTOR, FSDP, MEGATRON, ON_FSDP, ON_MEGATRON, actor_of, line

pytestmark = [on_the_newest("verl"), pytest.mark.slow]


def drawn_of(keys: tuple[Key, ...], *numbers: int) -> list[Drawn]:
    """The configs with these numbers, which differ in what becomes of them."""
    every = draw(keys, seed=2, count=35)
    return [every[number] for number in numbers]


def plan_of(*more: str, version: str = "") -> Callable[[Drawn], Verdict]:
    options = ("--transformer-engine", version) if version else ()
    return lambda drawn: of_plan(line(drawn, *more), drawn, *options)


def on_megatron(drawn: Drawn, checkpoint: Path) -> Verdict:
    """The verdict of verl's Megatron engine after one step on made-up gradients."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    role = actor_of(line(drawn, *ON_MEGATRON))
    fields = {**role.engine.override_transformer_config, **CPU_FIELDS}
    object.__setattr__(role.engine, "override_transformer_config", fields)
    engine = MegatronEngineWithLMHead(
        model_config=HFModelConfig(path=str(checkpoint), use_remove_padding=False),
        engine_config=role.engine,
        optimizer_config=role.optim,
        checkpoint_config=CheckpointConfig(save_contents=[], load_contents=[]),
    )
    engine.initialize()
    return verdicts.on_megatron(engine.module, engine.optimizer)


def test_on_megatron(fused_adam: str, checkpoint: Path) -> None:
    flags = [{"adam_beta2": "null"}, {"fp16": "true"}]
    drawn = [Drawn({f"{_STATES}.{key}": value for key, value in one.items()}) for one in flags]
    bucket = f"{ACTOR}.megatron.override_ddp_config.grad_reduce_in_fp32"
    drawn += [Drawn({bucket: "true"}, {"grad_bucket": "align", "optimizer_states": "follow-model"})]
    drawn += drawn_of(MEGATRON, 1, 4, 5, 8, 9, 13, 14, 17, 19, 21, 23, 25, 27, 28, 29, 32, 34)
    plan = plan_of(*ON_MEGATRON, version=fused_adam)
    agree(drawn, plan, lambda one: on_megatron(one, checkpoint))


def test_each_remedy() -> None:
    offloaded = {f"{_STATES}.optimizer_cpu_offload": "true", **_AWARE}
    moments = [f"{ACTOR}.optim.exp_avg_dtype", f"{_STATES}.exp_avg_dtype"]
    drawn = [Drawn({key: "bf16", **offloaded}) for key in moments]
    aware = {f"{ACTOR}.optim.use_precision_aware_optimizer": "true"}
    drawn += [Drawn({moments[0]: "bf16", **offloaded, **aware}), *singles(MEGATRON)]
    version = ("--transformer-engine", "2.14")
    hold_remedies(drawn, lambda one: line(one, *ON_MEGATRON), *version)
    sharded = [Drawn({moments[1]: "bf16"}), *singles(FSDP)]
    hold_remedies(sharded, lambda one: line(one, *ON_FSDP))


_STATES = f"{ACTOR}.optim.override_optimizer_config"
_AWARE = {f"{_STATES}.use_precision_aware_optimizer": "true"}


@pytest.mark.parametrize("out", [{"features": "-dtype-coercion"}, {"frameworks": "skyrl"}], ids=str)
def test_names_where_they_are_not_coerced(
    fused_adam: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, out: dict[str, str]
) -> None:
    drawn = [
        Drawn({**_AWARE, f"{_STATES}.exp_avg_sq_dtype": "torch.float32"}),
        Drawn({f"{_STATES}.main_grads_dtype": "fp32"}),
        Drawn(
            {
                f"{ACTOR}.optim.use_precision_aware_optimizer": "true",
                f"{ACTOR}.optim.exp_avg_dtype": "bf16",
            }
        ),
    ]
    for name, value in out.items():
        monkeypatch.setenv(f"PRECISION_SHIM_{name.upper()}", value)
    plan, named = plan_of(*ON_MEGATRON, version=fused_adam), "FusedAdam .* must be one of"
    workers = [
        by_worker(lambda one=one: on_megatron(one, checkpoint), one, named=named, **out)
        for one in drawn
    ]
    hold(drawn, plan, workers)


def test_on_fsdp(fsdp_ranks: Ranks) -> None:
    """Parameters that are stored in fp16 have their moments in fp16, where AdamW's eps is 0."""
    half = {
        f"{ACTOR}.fsdp_config.{key}": "fp16"
        for key in ("model_dtype", "mixed_precision.param_dtype")
    }
    fused = {**half, f"{_STATES}.fused": "true"}
    low = {f"{ACTOR}.fsdp_config.model_dtype": "bf16"}  # both tell that masters are missing
    drawn = [Drawn(one) for one in (half, {**half, f"{_STATES}.eps": "1e-7"}, fused, low)]
    drawn += drawn_of(FSDP, 0, 1, 2, 3, 5, 7, 9, 15, 18, 19, 23, 25, 26, 34)
    (found,) = fsdp_ranks("verdicts", world=1, drawn=[asdict(one) for one in drawn])
    workers = [Verdict(**one) for one in found]
    assert len(hold(drawn, plan_of(*ON_FSDP), workers)) > 1
    assert "model_dtype=fp16" in plan_of(*ON_FSDP)(drawn[0]).refused
    assert [bool(one.refused) for one in workers[:4]] == [True, False, False, False]
