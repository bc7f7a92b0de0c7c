"""Compares the dtype and model names that the real vLLM accepts with those that the shim lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from precision_shim.precision.agreement import AUTO, ENGINE_NAMES, Engine, judge_gates
from precision_shim.precision.names import ALIASES
from precision_shim_adapters.agreement.engines import chosen_by, gate_dtype, refusal_of_fp16
from precision_shim_adapters.agreement.lm_head import FIELD, of_rollout
from precision_shim_adapters.agreement.model_files import gates_of, resolve_by_model
from precision_shim_adapters.agreement.names import engine_name

CONFIG = Callable[..., Any]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("prefix", ["", "torch."])
def test_vllm_takes_the_name_that_the_shim_hands_on(
    dtype: torch.dtype, prefix: str, checkpoint: Path, model_config: CONFIG
) -> None:
    written = prefix + str(dtype).removeprefix("torch.").upper()
    name = engine_name(written, "key", "vLLM")
    assert name in ENGINE_NAMES.values()
    assert model_config(checkpoint, name).dtype == dtype


def test_the_shim_knows_that_this_vllm_has_an_lm_head_in_fp32(
    checkpoint: Path, model_config: CONFIG
) -> None:
    head = of_rollout("vllm", {}, "kwargs")
    assert (head.refusal, head.in_fp32) == ("", False)
    assert head.key == f"kwargs.hf_overrides.{FIELD}"
    overrides = {FIELD: head.value}
    made = model_config(checkpoint, "bfloat16", hf_overrides=overrides)
    assert (made.dtype, made.head_dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("stored", "computes"),
    [("float32", "bfloat16"), ("float16", "float16"), ("bfloat16", "bfloat16")],
)
def test_auto_takes_the_checkpoints_dtype_and_bf16_for_fp32(
    stored: str, computes: str, model: Any, tmp_path: Path, model_config: CONFIG
) -> None:
    config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = stored
    config.save_pretrained(tmp_path)
    assert engine_name("auto", "key", "vLLM") == "auto"
    assert model_config(tmp_path, "auto").dtype == getattr(torch, computes)
    assert chosen_by("vllm", config.to_dict(), ()) == ALIASES[computes]


@pytest.mark.parametrize(
    ("named", "stored"),
    [("float32", "bfloat16"), ("float16", "bfloat16"), (None, "float16"), (None, "bfloat16")],
)
def test_auto_takes_the_configs_dtype_or_that_of_the_files(
    named: str | None, stored: str, model: Any, tmp_path: Path, model_config: CONFIG
) -> None:
    """An export with ``state_dict=`` writes another dtype into the config than into the files."""
    kept = {name: one.to(getattr(torch, stored)) for name, one in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=kept)
    config = json.loads((tmp_path / "config.json").read_text())
    config = {**config, "dtype": named} if named else {**config, "dtype": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = resolve_by_model(Engine("rollout", AUTO, "key"), "vllm", str(tmp_path))
    found = model_config(tmp_path, "auto").dtype
    assert ENGINE_NAMES[engine.computes] == str(found).removeprefix("torch.")


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "glm4", "plamo2", "qwen2"])
def test_the_shim_reads_which_models_vllm_refuses_in_fp16(both_sides: Any, kind: str) -> None:
    from vllm.config.model import _FLOAT16_NOT_SUPPORTED_MODELS

    reason = _FLOAT16_NOT_SUPPORTED_MODELS.get(kind, "")
    found = refusal_of_fp16("vllm", kind)
    assert bool(found) is bool(reason)
    assert reason in found


QWEN, DEEPSEEK = "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"


@pytest.mark.parametrize(
    ("kind", "more", "dtype"),
    [
        (QWEN, {}, "model"),
        ("OlmoeForCausalLM", {}, "model"),
        ("GptOssForCausalLM", {}, "model"),
        ("Glm4MoeForCausalLM", {}, "fp32"),
        ("MiniMaxM2ForCausalLM", {}, "fp32"),
        ("NemotronHForCausalLM", {}, "fp32"),
        (DEEPSEEK, {}, "model"),
        (DEEPSEEK, {"moe_router_dtype": "float32"}, "fp32"),
        ("MixtralForCausalLM", {}, ""),  # its dtype is an argument
        ("BailingMoeForCausalLM", {}, ""),  # its dtype is set in three places
        ("BailingMoeV3ForCausalLM", {}, ""),  # it has a class of its own for the router
        ("Qwen3ForCausalLM", {}, ""),
        ("Absent", {}, ""),
    ],
)
def test_the_routers_dtype_is_read_from_the_models_code(
    kind: str, more: dict[str, Any], dtype: str
) -> None:
    assert gate_dtype("vllm", {"architectures": [kind], **more}) == dtype


@pytest.mark.parametrize(
    ("kind", "written", "chosen"),
    [
        (QWEN, "fp32", "bf16 beside the actor's fp32"),
        (QWEN, None, "bf16, as the actor"),
        (QWEN, "", "bf16 beside the actor's not known here"),
        (DEEPSEEK, "fp32", "bf16 beside the actor's fp32"),
        ("Glm4MoeForCausalLM", "fp32", "fp32, as the actor"),
        ("MixtralForCausalLM", "fp32", "not known here beside the actor's fp32"),
    ],
)
def test_both_sides_routers(tmp_path: Path, kind: str, written: str | None, chosen: str) -> None:
    trainer, rollout = (Engine(name, "bf16", "key") for name in ("actor", "rollout"))
    config = {"architectures": [kind], "model_type": "moe", "num_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fields = {} if written == "" else {"moe_router_dtype": written}
    given = (trainer, [rollout], "vllm", str(tmp_path), fields)
    found = judge_gates("toyfw", gates_of(*given, place="router_{}"))
    (made,) = found.decisions
    assert (made.subject, made.chosen) == ("router", chosen)
    assert made.because.startswith("router_moe_router_dtype")
    assert ("a token may go to other experts" in made.because) is ("as the" not in chosen)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": 0}))
    assert gates_of(*given, place="router_{}") == ()
