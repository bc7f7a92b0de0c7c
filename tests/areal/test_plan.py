"""``precision-shim plan`` for AReaL's jobs, with AReaL's own loader and the worker's decisions."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from precision_shim.cli import main

from .cpu import config, engine
from .test_pages import YAML

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
