"""``precision-shim plan`` for AReaL's jobs, with AReaL's own loader and the worker's decisions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import precision_shim
from precision_shim.cli import main
from precision_shim_adapters import areal_plan
from precision_shim_adapters.areal_plan import load

from ..plan.models import QWEN25_7B
from .cpu import config, engine, import_engine, train
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


def test_a_parameter_gather_that_needs_virtual_stages(
    capsys: pytest.CaptureFixture[str], line: list[str], on: Callable[..., Any], on_cpu: Any
) -> None:
    name = "overlap_param_gather_with_optimizer_step"
    code, found = plan(capsys, *line, f"+actor.megatron.{name}=true")
    assert (code, [one["key"] for one in found["problems"]]) == (1, [f"actor.megatron.{name}"])
    on()
    with pytest.raises(IndexError):
        engine(on_cpu, config(**{name: True}))


@pytest.mark.parametrize("value", ["1e39", "inf"])
def test_loss_scales_that_fp32_cannot_hold(
    capsys: pytest.CaptureFixture[str],
    line: list[str],
    on: Callable[..., Any],
    on_cpu: Any,
    value: str,
) -> None:
    name = "initial_loss_scale"
    code, found = plan(capsys, *line, FP16, f"+actor.optimizer.{name}={value}")
    assert (code, [one["key"] for one in found["problems"]]) == (1, [f"actor.optimizer.{name}"])
    on()
    with pytest.raises(precision_shim.SettingsError, match=r"above 0 and up to 3\.4e38"):
        engine(on_cpu, config("float16", optimizer={name: float(value)}))


def of_model(
    capsys: pytest.CaptureFixture[str], folder: Path, line: list[str], *words: str, **more: Any
) -> tuple[int, Any]:
    """Plan a job with a real model's config, in ``folder``."""
    (folder / "config.json").write_text(json.dumps({**QWEN25_7B, **more}))
    with pytest.raises(SystemExit) as end:
        main(["plan", "--model", str(folder), "--json", "--", *line, *words])
    said = capsys.readouterr()
    return int(str(end.value)), json.loads(said.out) if said.out else said.err


EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 10,
}


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("more", [{}, EXPERTS], ids=["dense", "experts"])
def test_stages_are_split_by_size(
    capsys: pytest.CaptureFixture[str],
    line: list[str],
    tmp_path: Path,
    virtual: int,
    more: dict[str, Any],
) -> None:
    """The plan's stages have as many layers as AReaL gives Megatron."""
    import_engine()
    from areal.api import MegatronParallelStrategy
    from areal.engine.megatron_utils.pipeline_parallel import configure_pipeline_layer_splits
    from megatron.core.transformer import TransformerConfig
    from transformers import AutoConfig

    hf = {**QWEN25_7B, **more}
    layers = hf["num_hidden_layers"]
    theirs: dict[str, Any] = {"num_layers": layers, "gated_linear_unit": True}
    if more:
        theirs |= {"num_moe_experts": 8, "moe_ffn_hidden_size": 512}
    made = configure_pipeline_layer_splits(
        MegatronParallelStrategy(pipeline_parallel_size=4, virtual_pipeline_parallel_size=virtual),
        AutoConfig.for_model(**hf),
        TransformerConfig(
            hidden_size=hf["hidden_size"],
            num_attention_heads=hf["num_attention_heads"],
            add_bias_linear=False,
            **theirs,
        ),
    )
    chunks = made.pipeline_model_parallel_layout.layout
    right = [sum(str(one).count("decoder") for one in stage) for stage in chunks]
    words = ["actor.backend=megatron:p4"]
    words += [f"+actor.megatron.virtual_pipeline_parallel_size={virtual}"] * (virtual > 1)
    code, found = of_model(capsys, tmp_path, line, *words, **more)
    assert code == 0
    (model,) = [one for one in found["models"] if one["subject"] == "actor"]
    held = [stage["parts"][0]["parameters"] for stage in model["before"]]
    layer = held[1] // right[1]
    rest = held[0] - right[0] * layer, held[3] - right[3] * layer
    assert [held[1], held[2]] == [right[1] * layer, right[2] * layer]
    embedding = hf["vocab_size"] * hf["hidden_size"]
    assert rest == (embedding, embedding + hf["hidden_size"])
    assert len(set(right)) > 1
    assert sum(right) == layers
    if layers % 4 == 0 and virtual == 1:  # megatron-bridge takes no layout of AReaL's
        words += ["+actor.megatron.bridge_type=megatron-bridge"]
        code, found = of_model(capsys, tmp_path, line, *words, **more)
        held = [stage["parts"][0]["parameters"] for stage in found["models"][0]["before"]]
        assert (code, held[1]) == (0, layers // 4 * layer)


def test_a_split_that_is_not_known_is_noted(
    capsys: pytest.CaptureFixture[str], line: list[str], tmp_path: Path
) -> None:
    words = ["actor.backend=megatron:p4"]
    more = {**EXPERTS, "num_hidden_layers": 8, "mlp_only_layers": [0]}
    code, found = of_model(capsys, tmp_path, line, *words, **more)
    assert (code, "evenly split" in json.dumps(found["models"])) == (0, True)


def test_virtual_stages_of_a_single_stage(
    capsys: pytest.CaptureFixture[str], line: list[str]
) -> None:
    from areal.api import MegatronParallelStrategy

    key = "actor.megatron.virtual_pipeline_parallel_size"
    code, found = plan(capsys, *line, "actor.backend=megatron:d4", f"+{key}=2")
    assert (code, [one["key"] for one in found["problems"]]) == (1, [key])
    with pytest.raises(Exception, match="pipeline_parallel_size > 1"):
        MegatronParallelStrategy(virtual_pipeline_parallel_size=2)


@pytest.mark.parametrize("method", [None, "awq", "fp8"])
def test_fp8_needs_fp8_weights(
    capsys: pytest.CaptureFixture[str], line: list[str], tmp_path: Path, method: str | None
) -> None:
    quantized: dict[str, Any] = {}
    if method:
        quantized["quantization_config"] = {"quant_method": method}
    words = ["actor.backend=megatron:d4", "+actor.megatron.fp8_config.mode=hybrid"]
    code, found = of_model(capsys, tmp_path, line, *words, **quantized)
    keys = [one["key"] for one in found["problems"]]
    assert (code, keys) == ((0, []) if method == "fp8" else (1, ["actor.megatron.fp8_config"]))
    assert "fp8 weights are counted" in json.dumps(found["models"])
    own = import_engine().MegatronEngine._validate_fp8_consistency
    given = SimpleNamespace(
        enable_fp8=True, quantization_config=quantized.get("quantization_config")
    )
    if method == "fp8":
        own(given)
    else:
        with pytest.raises(RuntimeError, match="weights must be FP8"):
            own(given)
