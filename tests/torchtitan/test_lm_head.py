"""PRECISION_SHIM_HEAD=fp32 in torchtitan's RL job: its own converter, in trainer and generators."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.errors import UnsupportedPrecisionError

from ..every_framework.both_sides import plan_of, watched
from .test_both_sides import QUIET, RECIPE, control, line, parse, spawned
from .test_pages import importable  # noqa: F401

pytestmark = pytest.mark.slow

HEAD = {"head": "fp32"}
PLAIN = """
from dataclasses import fields
from torchtitan.experiments.rl.examples.alphabet_sort import config_registry
from torchtitan.models.common.linear import Linear

def plain(kind=Linear.Config, **more):
    config = config_registry.rl_grpo_qwen3_0_6b_varlen()
    head = config.model_spec.model.lm_head
    kept = {one.name: getattr(head, one.name) for one in fields(Linear.Config)}
    config.model_spec.model.lm_head = kind(**kept, **more)
    return config

def half():
    from torchtitan.experiments.rl.models.cast_linear import CastLinear
    return plain(CastLinear.Config, compute_dtype="bfloat16")
"""
"""The shipped job has the converter, so these jobs take it out again."""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "head_jobs.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "head_jobs", raising=False)


def job(name: str) -> tuple[str, ...]:
    return RECIPE if name == "shipped" else ("--module", "head_jobs", "--config", name)


def said() -> list[str]:
    made = precision_shim.status().decisions
    return [one.chosen for one in made if one.subject == "LM head"]


def head_of(config: Any) -> Any:
    return config.model_spec.model.lm_head


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize("name", ["plain", "shipped"])
def test_both_actors_get_the_converted_model(
    shim: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shim(settings=HEAD, export=False)
    config = parse(recipe=job(name))
    kept = {one.name: getattr(head_of(config), one.name) for one in fields(head_of(config))}
    controller, told = watched(lambda: control(config))
    assert not told
    assert said() == ["fp32 in trainer and rollout"]
    actors = spawned(controller, monkeypatch)
    for _, _, given in actors.values():
        head = given["model_spec"].model.lm_head
        assert head.compute_dtype == "float32"
        assert {key: getattr(head, key) for key in kept} == {**kept}
    layer = head_of(config).build()
    weight = torch.randn(layer.weight.shape[0], layer.weight.shape[1], dtype=torch.bfloat16) / 8
    layer.weight = torch.nn.Parameter(weight)
    assert layer(weight[:1]).dtype == torch.float32
    monkeypatch.setenv("PRECISION_SHIM_HEAD", "fp32")
    found = plan_of(line(*QUIET, recipe=job(name)))
    assert not [one for one in found["problems"] if one["code"] == "lm-head"]
    assert ["fp32 in trainer and rollout" in one for one in found["notes"] if "LM head" in one] == [
        True
    ]


@pytest.mark.usefixtures("jobs")
def test_a_converter_of_the_users_stays(shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shim(settings=HEAD, export=False)
    config = parse(recipe=job("half"))
    _, told = watched(lambda: control(config))
    (refusal,) = told
    assert "LMHeadCastConverter has compute_dtype=bfloat16" in refusal
    assert head_of(config).compute_dtype == "bfloat16"
    monkeypatch.setenv("PRECISION_SHIM_HEAD", "fp32")
    problems = plan_of(line(*QUIET, recipe=job("half")))["problems"]
    assert [f"{one['message']}. {one['remedy']}" for one in problems] == [refusal]
    shim(settings=HEAD, strict=True, export=False)
    with pytest.raises(UnsupportedPrecisionError, match="PRECISION_SHIM_HEAD=fp32 is refused"):
        control(parse(recipe=job("half")))
