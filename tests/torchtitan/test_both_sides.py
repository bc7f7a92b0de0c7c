"""Dtypes of trainer and generator in an RL job: reports of driver and plan, vLLM's arguments.

The configs go through torchtitan's own manager, ``Controller``, ``setup_async`` and
``VLLMGenerator``, until the arguments of vLLM's engine are built.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.errors import DtypeError, UnsupportedPrecisionError
from precision_shim_tools.cli import main

from ..every_framework.shim_warnings import watched
from ..processes.rank_server import Ranks
from . import cpu
from .test_pages import importable  # noqa: F401

RECIPE = ("--module", "alphabet_sort", "--config", "rl_grpo_qwen3_0_6b_varlen")
QUIET = ("--metrics.no-enable-wandb",)
TRAINER, GENERATOR = "--trainer.training.mixed_precision_param", "--generator.model_dtype"
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
PAIRS = [("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "fp16"), ("fp32", "bf16")]
LOST = [("fp16", "bf16")]
FOLLOW = {"rollout": "follow"}


class StopError(Exception):
    """Raised at the point where an engine or an actor's process would start."""


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

    async def stop(*args: Any, **more: Any) -> None:
        raise StopError

    router = SimpleNamespace(spawn_procs=lambda **more: Mesh())
    monkeypatch.setattr(module, "this_host", lambda: router)
    monkeypatch.setattr(module, "setup_torch_elastic_env_async", nothing)
    monkeypatch.setattr(
        module, "ts", SimpleNamespace(initialize=stop, LocalRankStrategy=lambda: None)
    )
    mesh = Mesh()
    with pytest.raises(StopError):
        asyncio.run(controller.setup_async(trainer_mesh=mesh, generator_meshes=[mesh]))
    return mesh.spawned


def arguments(controller: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The dtype in which the trainer sends the weights, and the dtype of vLLM's engine."""
    actors = spawned(controller, monkeypatch)
    (_, _, to_trainer), (kind, given, more) = actors["trainer"], actors["generator"]
    engine: dict[str, Any] = {}

    def engine_args(**kwargs: Any) -> None:
        engine.update(kwargs)
        raise StopError

    stand_in_for_vllm(monkeypatch, engine_args)
    with pytest.raises(StopError):
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


def decisions() -> list[tuple[str, str]]:
    return [
        (one.chosen, one.because)
        for one in precision_shim.status().decisions
        if (one.framework, one.feature) == ("torchtitan", "rollout-agreement")
    ]


def chosen(trainer: str, generator: str) -> str:
    same = trainer == generator
    return f"{generator}, as the policy" if same else f"{generator} beside the policy's {trainer}"


# -- the driver's messages, and the engine's dtype ---------------------------------------------


@pytest.mark.parametrize(("trainer", "generator"), PAIRS)
def test_the_driver_tells(
    shim: Any, monkeypatch: pytest.MonkeyPatch, trainer: str, generator: str
) -> None:
    shim()
    config = parse(f"{TRAINER}={trainer}", f"{GENERATOR}={generator}")
    controller, told = watched(lambda: control(config))
    assert [one for one, _ in decisions()] == [chosen(trainer, generator)]
    assert len(told) == ((trainer, generator) in LOST)
    for text in told:
        assert text.startswith("torchtitan 0.3.0: the policy computes in fp16 (trainer.training.")
        assert f"the rollout in {generator} (generator.model_dtype: " in text
        assert "Write generator.model_dtype=float16, or set PRECISION_SHIM_ROLLOUT=" in text
    own = DTYPES[generator]
    assert arguments(controller, monkeypatch) == (own, own)


def test_strict(shim: Any) -> None:
    shim(strict=True)
    config = parse(f"{TRAINER}=fp16", f"{GENERATOR}=bf16")
    with pytest.raises(UnsupportedPrecisionError, match=r"generator\.model_dtype=float16"):
        control(config)
    assert [one for one, _ in decisions()] == [chosen("fp16", "bf16")]


def test_off_nothing_is_said(shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shim(features="-rollout-agreement", settings=FOLLOW)
    config = parse(f"{TRAINER}=float16")
    controller, told = watched(lambda: control(config))
    assert told == decisions() == []
    assert arguments(controller, monkeypatch) == ("bfloat16", "bfloat16")


# -- follow ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trainer", "generator"), [*PAIRS, ("fp16", "")])
def test_the_generator_follows(
    shim: Any, monkeypatch: pytest.MonkeyPatch, trainer: str, generator: str
) -> None:
    """Also a dtype on the command line is replaced."""
    shim(settings=FOLLOW)
    given = [f"{GENERATOR}={generator}"] * bool(generator)
    controller, told = watched(lambda: control(parse(f"{TRAINER}={trainer}", *given)))
    assert told == []
    *keys, (chose, _) = decisions()
    replaced = f"generator.model_dtype: {DTYPES[generator or 'bf16']} -> {DTYPES[trainer]}"
    assert keys == [(replaced, "PRECISION_SHIM_ROLLOUT=follow")] * (trainer != generator)
    assert chose == chosen(trainer, trainer)
    assert arguments(controller, monkeypatch) == (DTYPES[trainer], DTYPES[trainer])


def test_a_value_that_is_assigned_after_the_command_line_follows(shim: Any) -> None:
    shim(settings=FOLLOW)
    config = parse(f"{TRAINER}=float16")
    config.generator.model_dtype = "BF16"
    _, told = watched(lambda: control(config))
    assert (told, config.generator.model_dtype) == ([], "float16")


# -- the plan ----------------------------------------------------------------------------------


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    command = ("python", "-m", "torchtitan.experiments.rl.train", *words)
    with pytest.raises(SystemExit) as end:
        main(["plan", "--json", "--parameters", "600M", "--", *command])
    said = capsys.readouterr()
    assert end.value.code in (0, 1), said.err
    found: dict[str, Any] = json.loads(said.out)
    return found


@pytest.mark.parametrize("rollout", ["tell", "follow"])
@pytest.mark.parametrize(("trainer", "generator"), PAIRS)
def test_the_plan_says_what_the_driver_says(
    shim: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    trainer: str,
    generator: str,
    rollout: str,
) -> None:
    words = [f"{TRAINER}={trainer}", f"{GENERATOR}={generator}"]
    monkeypatch.setenv("PRECISION_SHIM_ROLLOUT", rollout)
    found = planned(capsys, *RECIPE, *words)
    shim()
    config = parse(*words)
    _, told = watched(lambda: control(config))
    problems = [f"{one['message']}. {one['remedy']}" for one in found["problems"]]
    assert problems == told
    assert all(one["code"] == "rollout-dtype" for one in found["problems"])
    notes = [one for one in found["notes"] if "rollout-agreement" in one]
    assert [one.partition(": rollout-agreement: ")[2] for one in notes] == [
        f"{chose} ({because})" for chose, because in decisions()
    ]


@pytest.mark.parametrize("name", ["fp17", "auto", "fp8"])
def test_a_wrong_name(shim: Any, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Launch and plan refuse a wrong name; ``auto`` is allowed if no trainer needs the dtype."""
    (problem,) = planned(capsys, *RECIPE, f"{GENERATOR}={name}")["problems"]
    assert (problem["code"], problem["key"]) == ("dtype", "generator.model_dtype")
    shim()
    with pytest.raises((DtypeError, SystemExit)) as raised:
        control(parse(f"{GENERATOR}={name}"))
    said = str(raised.value) + capsys.readouterr().err
    assert "generator.model_dtype" in said
    assert repr(name) in said


# -- the weights -------------------------------------------------------------------------------


@pytest.mark.parametrize(("trainer", "generator"), PAIRS)
def test_the_weights_are_rounded_once(
    policy: Any, shim: Any, monkeypatch: pytest.MonkeyPatch, trainer: str, generator: str
) -> None:
    """fp32 parameters are rounded once, to the generator's dtype; buffers are not rounded."""
    from torchtitan.experiments.rl.actors import trainer as module

    pushed: dict[str, Any] = {}

    async def put_state_dict(state_dict: Any, key: str, **options: Any) -> None:
        pushed.update(state_dict)

    monkeypatch.setattr(module, "ts", SimpleNamespace(put_state_dict=put_state_dict))
    shim()
    made = policy(DTYPES[trainer], generator_dtype=DTYPES[generator])
    assert [one for one, _ in decisions()] == [chosen(trainer, generator)]
    held, dtype = made.model.state_dict(), getattr(torch, DTYPES[generator])
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
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_ranks_send_the_same_with_the_shim_and_without(ranks: Ranks, dtype: str) -> None:
    """One step moves the parameters off their initial values before they are sent."""
    options: dict[str, Any] = {"dtype": "float32", "generator": dtype, "first": 0, "last": 1}
    ours, theirs = (ranks("policy", push=True, on=on, **options) for on in (True, False))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["pushed"] == other["pushed"] == mine["rounded"]
        assert len(mine["pushed"]) > 10
    assert ours[0]["pushed"] != ours[1]["pushed"]
