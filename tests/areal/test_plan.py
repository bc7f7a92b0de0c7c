"""``precision-shim plan`` for AReaL's jobs, with AReaL's own loader and the worker's decisions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precision_shim
from precision_shim.cli import main
from precision_shim_adapters import areal_plan
from precision_shim_adapters.areal_plan import load

from .cpu import config, engine, train
from .test_pages import YAML

FP16 = "actor.dtype=fp16"
AWARE = "+actor.megatron.use_precision_aware_optimizer=true"
SCRIPT = """
from areal.api.cli_args import GRPOConfig, load_expr_config
config, _ = load_expr_config(args, GRPOConfig)
"""


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    """A launch line like the one in AReaL's README."""
    (tmp_path / "gsm8k_rl.py").write_text(SCRIPT)
    (tmp_path / "example.yaml").write_text(YAML)
    return ["python3", str(tmp_path / "gsm8k_rl.py"), "--config", str(tmp_path / "example.yaml")]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    options = ["--parameters", "1B", "--transformer-engine", "2.11.0", "--json"]
    with pytest.raises(SystemExit) as end:
        main(["plan", *options, "--", *words])
    said = capsys.readouterr()
    return int(str(end.value)), json.loads(said.out) if said.out else said.err


def test_a_job_is_planned(capsys: pytest.CaptureFixture[str], line: list[str]) -> None:
    line = ["PRECISION_SHIM=1", *line]
    code, found = plan(capsys, *line, "actor.optimizer.type=adam_bf16")
    assert (code, found["framework"], found["world_size"]) == (0, "areal", 4)
    assert any("2 bytes per parameter more" in one for one in found["notes"])
    code, found = plan(capsys, *line, "actor.dtype=fp16")
    assert code == 0
    assert "loss scaler from 32768" in json.dumps(found)
    code, found = plan(capsys, *line, "+actor.megatron.exp_avg_dtype=bf17")
    assert code == 1
    assert "bf17" in json.dumps(found["problems"])


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("exp_avg_dtype", "bf16", False),
        ("main_grads_dtype", "torch.float32", False),
        ("exp_avg_dtype", "bfloat16", True),
    ],
)
@pytest.mark.parametrize("out", ["PRECISION_SHIM=0", "PRECISION_SHIM_FEATURES=-dtype-coercion"])
def test_names_where_they_are_not_coerced(
    capsys: pytest.CaptureFixture[str],
    line: list[str],
    on_cpu: Any,
    out: str,
    name: str,
    value: str,
    takes: bool,
) -> None:
    aware = "+actor.megatron.use_precision_aware_optimizer=true"
    code, found = plan(capsys, out, *line, aware, f"+actor.megatron.{name}={value}")
    assert [one["key"] for one in found["problems"]] == [f"actor.megatron.{name}"] * (not takes)
    assert code == (not takes)
    refuses = contextlib.nullcontext() if takes else pytest.raises(AttributeError)
    with refuses:
        engine(on_cpu, config(use_precision_aware_optimizer=True, **{name: value}))


def test_what_is_not_planned_is_said(
    capsys: pytest.CaptureFixture[str], line: list[str], tmp_path: Path
) -> None:
    code, said = plan(capsys, *line, "actor.backend=fsdp:d4")
    assert (code, "planned are models on Megatron" in said) == (2, True)
    for wrong in ("megatron:abc", "megatron:d0"):
        code, said = plan(capsys, *line, f"actor.backend={wrong}")
        assert (code, f"actor.backend='{wrong}': AReaL cannot read it" in said) == (2, True)
    code, said = plan(capsys, *line, "actor.no_such_key=1")
    assert (code, "no_such_key" in said) == (2, True)
    code, said = plan(capsys, *line[:2], "actor.dtype=fp16")
    assert (code, "the following arguments are required: --config. Correct" in said) == (2, True)
    (tmp_path / "gsm8k_rl.py").write_text("import areal\n")
    code, said = plan(capsys, *line)
    assert (code, "load_expr_config" in said) == (2, True)


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize(
    "name", ["initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"]
)
def test_numbers_that_megatrons_scaler_refuses(
    capsys: pytest.CaptureFixture[str],
    line: list[str],
    on: Callable[..., Any],
    on_cpu: Any,
    name: str,
    value: str,
) -> None:
    code, found = plan(capsys, *line, FP16, f"+actor.optimizer.{name}={value}")
    assert code == 1
    assert [one["key"] for one in found["problems"]] == [f"actor.optimizer.{name}"]
    on()
    with pytest.raises(precision_shim.SettingsError, match=rf"areal 1\.0\.4.*{name}=.*above 0"):
        engine(on_cpu, config("float16", optimizer={name: int(value)}))


def test_a_first_scale_below_the_least(
    capsys: pytest.CaptureFixture[str], line: list[str], on: Callable[..., Any], on_cpu: Any
) -> None:
    scales = {"initial_loss_scale": 16.0, "min_loss_scale": 32.0}
    words = [f"+actor.optimizer.{name}={value}" for name, value in scales.items()]
    code, said = plan(capsys, *line, FP16, *words)
    assert (code, "initial_loss_scale=16 is below min_loss_scale=32" in said) == (2, True)
    on()
    with pytest.raises(precision_shim.SettingsError, match="is below min_loss_scale=32"):
        engine(on_cpu, config("float16", optimizer=scales))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("megatron.ddp.use_distributed_optimizer", "false"),
        ("optimizer.lr", "nan"),
        ("optimizer.lr", "-1"),
        ("optimizer.lr", "inf"),
        ("optimizer.lr_scheduler_type", "abc"),
        ("optimizer.lr_scheduler_type", "WSD"),
    ],
)
def test_values_that_areals_engine_refuses(
    capsys: pytest.CaptureFixture[str],
    line: list[str],
    on_cpu: Any,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    value: str,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(areal_plan, "load", lambda job: made.append(load(job)) or made[0])
    code, found = plan(capsys, *line, f"+actor.{key}={value}")
    assert code == 1
    assert [one["key"] for one in found["problems"]] == [f"actor.{key}"]
    with pytest.raises(Exception, match=r"^$|distributed optimizer|decay style"):
        engine(on_cpu, made[0][2].actor)


def test_fp16_gradients_that_are_not_clipped(
    capsys: pytest.CaptureFixture[str], line: list[str], on: Callable[..., Any], on_cpu: Any
) -> None:
    narrow = (FP16, AWARE, "+actor.megatron.ddp.grad_reduce_in_fp32=false")
    code, _ = plan(capsys, *line, *narrow)
    assert code == 1
    code, _ = plan(capsys, *line, *narrow, "actor.optimizer.gradient_clipping=0")
    assert code == 0
    on()
    asked = {"optimizer": {"gradient_clipping": 0.0}, "ddp": {"grad_reduce_in_fp32": False}}
    with pytest.warns(precision_shim.PrecisionShimWarning, match="another dtype"):
        made = engine(on_cpu, config("float16", use_precision_aware_optimizer=True, **asked))
    assert train(made, 0)["update_successful"] == 1.0


@pytest.mark.parametrize("memory", ["4", "3.5", "2"])
def test_areal_takes_the_lines_that_a_search_finds(
    capsys: pytest.CaptureFixture[str], line: list[str], memory: str
) -> None:
    words = ["+actor.optimizer.beta2=0.95", "actor.backend=megatron:d4"]
    options = ["--parameters", "500M", "--transformer-engine", "2.11.0"]
    with pytest.raises(SystemExit):
        main(["plan", *options, "--search", "--gpu-memory", memory, "--", *line, *words])
    said = capsys.readouterr().out
    found = [one.strip() for one in said.splitlines() if one.startswith("    ++")]
    assert (not found) == ("no precision settings" in said), said
    code, _ = plan(capsys, *line, *words, *found)
    assert code == 0
    assert "optimizer_cpu_offload" not in said
