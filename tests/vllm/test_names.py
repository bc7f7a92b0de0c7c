"""Compares the dtype and model names that the real vLLM accepts with those that the shim lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from precision_shim.precision.agreement import AUTO, ENGINE_NAMES, Engine
from precision_shim.precision.names import ALIASES
from precision_shim_adapters.agreement.engines import chosen_by, refusal_of_fp16
from precision_shim_adapters.agreement.lm_head import FIELD, of_rollout
from precision_shim_adapters.agreement.model_files import resolve_by_model
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
