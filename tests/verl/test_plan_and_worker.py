"""On the same generated configs, the plan and verl's own engines come to the same verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from ..every_framework.newest import on_the_newest
from ..plan import verdicts
from ..plan.verdicts import SEEDS, Drawn, Verdict, agree, draw, hold, of_plan
from ..processes.rank_server import Ranks, rank_server
from .support import CPU_FIELDS
from .verdict_lines import ACTOR, FSDP, MEGATRON, ON_FSDP, ON_MEGATRON, actor_of, line

pytestmark = [on_the_newest("verl"), pytest.mark.slow]


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


@pytest.mark.parametrize(("seed", "count"), SEEDS)
def test_on_megatron(fused_adam: str, checkpoint: Path, seed: int, count: int) -> None:
    plan = plan_of(*ON_MEGATRON, version=fused_adam)
    agree(draw(MEGATRON, seed, count), plan, lambda one: on_megatron(one, checkpoint))


_STATES = f"{ACTOR}.optim.override_optimizer_config"
_AWARE = {f"{_STATES}.use_precision_aware_optimizer": "true"}


@pytest.mark.parametrize("out", [{"features": "-dtype-coercion"}, {"frameworks": "skyrl"}], ids=str)
@pytest.mark.parametrize(
    "written",
    [
        {**_AWARE, f"{_STATES}.exp_avg_dtype": "bf16"},
        {**_AWARE, f"{_STATES}.exp_avg_sq_dtype": "torch.float32"},
        {**_AWARE, f"{_STATES}.main_grads_dtype": "bf16"},
        {f"{_STATES}.exp_avg_dtype": "fp32"},
        {f"{_STATES}.main_grads_dtype": "fp32"},
        {
            f"{ACTOR}.optim.use_precision_aware_optimizer": "true",
            f"{ACTOR}.optim.exp_avg_dtype": "bf16",
        },
    ],
    ids=str,
)
def test_names_where_they_are_not_coerced(
    fused_adam: str,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: dict[str, str],
    out: dict[str, str],
) -> None:
    drawn = Drawn(written)
    for name, value in out.items():
        monkeypatch.setenv(f"PRECISION_SHIM_{name.upper()}", value)
    plan, named = plan_of(*ON_MEGATRON, version=fused_adam), "FusedAdam .* must be one of"
    agree([drawn], plan, lambda one: on_megatron(one, checkpoint), named=named, **out)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("engines")
    with rank_server("tests.verl.verdict_ranks", folder, MODEL=str(checkpoint)) as ranks:
        yield ranks


@pytest.mark.parametrize(("seed", "count"), SEEDS)
def test_on_fsdp(engines: Ranks, seed: int, count: int) -> None:
    drawn = draw(FSDP, seed, count)
    (found,) = engines("verdicts", world=1, drawn=[asdict(one) for one in drawn])
    ended = hold(drawn, plan_of(*ON_FSDP), [Verdict(**one) for one in found])
    assert len(ended) > 1, ended


def test_moments_in_fp16(engines: Ranks) -> None:
    """Parameters that are stored in fp16 have their moments in fp16, where AdamW's eps is 0."""
    half = {
        f"{ACTOR}.fsdp_config.{key}": "fp16"
        for key in ("model_dtype", "mixed_precision.param_dtype")
    }
    eps = f"{_STATES}.eps"
    low = {f"{ACTOR}.fsdp_config.model_dtype": "bf16"}  # both tell that masters are missing
    fused = {**half, f"{_STATES}.fused": "true"}
    drawn = [Drawn(one) for one in (half, {**half, eps: "1e-7"}, fused, low)]
    (found,) = engines("verdicts", world=1, drawn=[asdict(one) for one in drawn])
    assert hold(drawn, plan_of(*ON_FSDP), [Verdict(**one) for one in found])["refused"] == 1
    assert "model_dtype=fp16" in plan_of(*ON_FSDP)(drawn[0]).refused


@pytest.mark.parametrize("written", [{"adam_beta2": "null"}, {"fp16": "true"}], ids=str)
def test_numbers_and_flags_on_megatron(
    fused_adam: str, checkpoint: Path, written: dict[str, str]
) -> None:
    drawn = Drawn({f"{_STATES}.{key}": value for key, value in written.items()})
    plan = plan_of(*ON_MEGATRON, version=fused_adam)
    agree([drawn], plan, lambda one: on_megatron(one, checkpoint))
