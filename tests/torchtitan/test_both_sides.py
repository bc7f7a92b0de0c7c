"""Dtypes of trainer and generator in an RL job: reports of driver and plan, vLLM's arguments.

The configs go through torchtitan's own manager, ``Controller``, ``setup_async`` and
``VLLMGenerator``, until the arguments of vLLM's engine are built.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.errors import DtypeError

from ..every_framework import both_sides as both
from ..processes.rank_server import Ranks
from . import cpu
from .test_pages import importable  # noqa: F401

RECIPE = ("--module", "alphabet_sort", "--config", "rl_grpo_qwen3_0_6b_varlen")
QUIET = ("--metrics.no-enable-wandb",)
TRAINER, GENERATOR = "--trainer.training.mixed_precision_param", "--generator.model_dtype"


class Anything:
    """Stands in for objects that the driver makes besides the engines."""

    def __init__(self, *args: Any, **more: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: []

    def build(self, **more: Any) -> Anything:
        return self


class Mesh:
    """Stands in for Monarch's mesh; it stores the actors that would be spawned."""

    def __init__(self) -> None:
        self.spawned: dict[str, Any] = {}

    def spawn(self, name: str, kind: Any, *args: Any, **more: Any) -> Any:
        self.spawned[name] = (kind, args, more)
        return Anything()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan writes its logs to ``outputs`` in the current directory."""
    monkeypatch.chdir(tmp_path)


def parse(*words: str, recipe: tuple[str, ...] = RECIPE) -> Any:
    from torchtitan.config import ConfigManager

    return ConfigManager().parse_args([*recipe, *QUIET, *words])


def control(config: Any) -> Any:
    """The driver's controller, built by its own ``__init__``."""
    config.renderer, config.rollouter, config.metrics = Anything(), Anything(), Anything()
    return config.build()


def spawned(controller: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The classes and arguments of the actors that the driver would start, by name."""
    from torchtitan.experiments.rl import controller as module

    async def nothing(*args: Any) -> None:
        pass

    async def stop_here(*args: Any, **more: Any) -> None:
        raise both.StopError

    router = SimpleNamespace(spawn_procs=lambda **more: Mesh())
    monkeypatch.setattr(module, "this_host", lambda: router)
    monkeypatch.setattr(module, "setup_torch_elastic_env_async", nothing)
    monkeypatch.setattr(
        module, "ts", SimpleNamespace(initialize=stop_here, LocalRankStrategy=lambda: None)
    )
    mesh = Mesh()
    with pytest.raises(both.StopError):
        asyncio.run(controller.setup_async(trainer_mesh=mesh, generator_meshes=[mesh]))
    return mesh.spawned


def arguments(controller: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The dtype in which the trainer sends the weights, and the dtype of vLLM's engine."""
    actors = spawned(controller, monkeypatch)
    (_, _, to_trainer), (kind, given, more) = actors["trainer"], actors["generator"]
    engine: dict[str, Any] = {}

    def engine_args(**kwargs: Any) -> None:
        engine.update(kwargs)
        raise both.StopError

    stand_in_for_vllm(monkeypatch, engine_args)
    with pytest.raises(both.StopError):
        kind(*given, **more)
    return to_trainer["generator_dtype"], engine["dtype"]


def stand_in_for_vllm(monkeypatch: pytest.MonkeyPatch, engine_args: Callable[..., Any]) -> None:
    """Replace the names of vLLM and of a GPU that a generator's ``__init__`` uses."""
    from torchtitan.experiments.rl.actors import generator as generators

    monkeypatch.setattr(generators, "EngineArgs", engine_args)
    monkeypatch.setattr(generators, "register_to_vllm", nothing_sync)
    monkeypatch.setattr(generators, "AttentionConfig", Anything)
    monkeypatch.setattr(generators, "AttentionBackendEnum", Anything())
    monkeypatch.setattr(generators, "has_cuda_capability", lambda *version: True)
    monkeypatch.setattr(generators.VLLMCudagraphConfig, "get_vllm_compilation_config", nothing_sync)


def nothing_sync(*args: Any, **more: Any) -> None:
    pass


def line(*words: str, recipe: tuple[str, ...] = RECIPE) -> tuple[str, ...]:
    return ("python", "-m", "torchtitan.experiments.rl.train", *recipe, *words)


class Titan(both.Sides):
    framework, model, key = "torchtitan", "policy", "generator.model_dtype"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def job(self, trainer: str, rollout: str, *more: str) -> tuple[str, ...]:
        return (f"{TRAINER}={trainer}", *([f"{GENERATOR}={rollout}"] if rollout else []), *more)

    def run(self, job: tuple[str, ...]) -> Any:
        return control(parse(*job))

    def handed(self, made: Any) -> str:
        sent, computes = arguments(made, self.monkeypatch)
        assert sent == computes
        return computes

    def line(self, job: tuple[str, ...]) -> tuple[str, ...]:
        return line(*job)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Titan:
    return Titan(monkeypatch)


class TestBothSides(both.BothSides, both.Planned):
    pass


# -- follow ------------------------------------------------------------------------------------


def test_the_default_follows(shim: Any, sides: Titan) -> None:
    shim(settings=both.FOLLOW)
    found = sides.start(sides.job("fp16", ""))
    assert (found.told, sides.handed(found.made)) == ([], "float16")
    assert found.chosen["dtype keys"] == "generator.model_dtype: bfloat16 -> float16"


def test_a_value_that_is_assigned_after_the_command_line_follows(shim: Any) -> None:
    shim(settings=both.FOLLOW)
    config = parse(f"{TRAINER}=float16")
    config.generator.model_dtype = "BF16"
    control(config)
    assert config.generator.model_dtype == "float16"


# -- quantized layers --------------------------------------------------------------------------

QUANTIZED = """
from dataclasses import dataclass, fields
from types import SimpleNamespace as Namespace
from torchtitan.components.quantization import float8
from torchtitan.experiments.rl.examples.alphabet_sort import config_registry
from torchtitan.models.common.linear import Linear

class Float8Linear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        _torchao_config: object = None

float8.Float8Linear = Float8Linear

def converted(granularity):
    config = config_registry.rl_grpo_qwen3_0_6b_varlen()
    cast = Namespace(scaling_granularity=Namespace(value=granularity))
    converter = object.__new__(float8.Float8LinearConverter)
    converter.torchao_config, converter.enabled = Namespace(cast_config_weight=cast), True
    converter.filter_fn = lambda config, name: "lm_head" not in name
    converter.convert(config.model_spec.model)
    return config

def rowwise():
    return converted("axiswise")

def tensorwise():  # torchtitan's emulation has torchao's default, whatever the recipe is
    return converted("tensorwise")
"""
"""torchtitan's own conversion, to a class without torchao's kernels, which need a GPU."""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rowwise", "weights in fp8 e4m3 (per channel), activations in fp8 e4m3 (per token)"),
        ("tensorwise", "weights and activations in fp8 e4m3 (per tensor)"),
    ],
)
def test_a_converted_model_has_one_format_on_both_sides(
    shim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    (tmp_path / "quantized_jobs.py").write_text(QUANTIZED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    recipe = ("--module", "quantized_jobs", "--config", name)
    _, notes = both.of_plan(line(*QUIET, recipe=recipe))
    shim()
    control(parse(recipe=recipe))
    (made,) = (one for one in precision_shim.status().decisions if one.subject == "rollout")
    assert made.chosen == f"{text}; not in lm_head, as the policy"
    assert "model_spec: Float8Linear" in made.because
    assert notes == [f"rollout: rollout-agreement: {made.chosen} ({made.because})"]


def test_the_formats_of_quantized_modules() -> None:
    from torchtitan.components.quantization import float8, mx
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.qwen3 import model_registry

    from precision_shim_adapters.torchtitan.config import format_of

    def read(kind: Any, name: str, only: int | None = None) -> str:
        spec = model_registry("debugmodel_moe")
        base = GroupedExperts if kind is not Linear else Linear
        made = kind
        if kind is Linear:
            config = dataclass(kw_only=True, slots=True)(type("Config", (Linear.Config,), {}))
            made = type(name, (Linear,), {"Config": config})
        for _, node, parent, key in [*spec.model.traverse(base.Config)][:only]:
            kept = {one.name: getattr(node, one.name) for one in fields(node)}
            setattr(parent, key, made.Config(**kept))
        found = format_of(spec)
        assert found is not None
        assert found.key == f"model_spec: {name}"
        return str(found)

    assert format_of(model_registry("debugmodel_moe")) is None
    assert format_of(None) is None
    experts = float8._get_float8_grouped_experts_cls(GroupedExperts)
    assert read(experts, "Float8GroupedExperts").startswith("weights in fp8 e4m3 (per channel)")
    experts = mx._get_mxfp8_grouped_experts_cls(GroupedExperts)
    said = read(experts, "MXFP8GroupedExperts")
    assert said.startswith("weights and activations in fp8 e4m3 (mx, 1x32); not in ")
    assert "lm_head" in said
    said = read(Linear, "NVFP4Linear")
    assert said.startswith("weights in fp4 e2m1 (nvfp4, 16x16), activations in fp4 e2m1 (nvfp4, 1x")
    assert "some layers" not in said
    assert read(Linear, "NVFP4Linear", 4).endswith(", some layers")


# -- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp17", "auto", "fp8"])
def test_a_wrong_name(shim: Any, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Launch and plan refuse a wrong name; ``auto`` is allowed if no trainer needs the dtype."""
    (problem,) = both.plan_of(line(f"{GENERATOR}={name}"))["problems"]
    assert (problem["code"], problem["key"]) == ("dtype", "generator.model_dtype")
    shim()
    with pytest.raises((DtypeError, SystemExit)) as raised:
        control(parse(f"{GENERATOR}={name}"))
    said = str(raised.value) + capsys.readouterr().err
    assert "generator.model_dtype" in said
    assert repr(name) in said


# -- the weights -------------------------------------------------------------------------------


@pytest.mark.parametrize(("trainer", "rollout"), [both.LOST, ("bf16", "fp16")])
def test_the_weights_are_rounded_once(
    policy: Any, shim: Any, monkeypatch: pytest.MonkeyPatch, trainer: str, rollout: str
) -> None:
    """fp32 parameters are rounded once, to the generator's dtype; buffers are not rounded."""
    from torchtitan.experiments.rl.actors import trainer as module

    pushed: dict[str, Any] = {}

    async def put_state_dict(state_dict: Any, key: str, **options: Any) -> None:
        pushed.update(state_dict)

    monkeypatch.setattr(module, "ts", SimpleNamespace(put_state_dict=put_state_dict))
    shim()
    made = policy(both.DTYPES[trainer], generator_dtype=both.DTYPES[rollout])
    held, dtype = made.model.state_dict(), getattr(torch, both.DTYPES[rollout])
    buffers = {name for name, _ in made.model.named_buffers()}
    for turn in ("with the shim", "without it"):
        cpu.endpoint(made, "push_model_state_dict")
        assert pushed.keys() == held.keys()
        for name, one in held.items():
            whole = any(name.endswith(ends) for ends in buffers)
            assert whole or one.dtype is torch.float32
            expected = cpu.local(one if whole else one.to(dtype))
            sent = cpu.local(pushed[name])
            assert sent.dtype is expected.dtype
            assert torch.equal(sent, expected), (name, turn)
        precision_shim.uninstall()


@pytest.mark.slow
def test_two_ranks_send_the_same_with_the_shim_and_without(ranks: Ranks) -> None:
    """One step moves the parameters off their initial values before they are sent."""
    options: dict[str, Any] = {"dtype": "float32", "generator": "float16", "first": 0, "last": 1}
    ours, theirs = (ranks("policy", push=True, on=on, **options) for on in (True, False))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["pushed"] == other["pushed"] == mine["rounded"]
        assert len(mine["pushed"]) > 10
    assert ours[0]["pushed"] != ours[1]["pushed"]
