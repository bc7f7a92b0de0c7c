"""The audit of SkyRL's Megatron worker: alone, with the other features, and under strict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from precision_shim.errors import InconsistentPrecisionError

from ..every_framework.without_effect import Case, cases, hold
from .support import build, fsdp_worker

MEGATRON = "trainer.policy.megatron_config"
BUCKET = f"{MEGATRON}.ddp_config.grad_reduce_in_fp32=false"
FLAGS = (
    f"{MEGATRON}.optimizer_config_kwargs.bf16=false",
    f"{MEGATRON}.optimizer_config_kwargs.params_dtype=fp32",
)


def test_what_skyrl_wrote_itself_raises_under_strict(
    fused_adam: str, checkpoints: dict[str, Path], shim: Any
) -> None:
    """SkyRL's OptimizerConfig says bf16 for every model, so an fp16 loss is not scaled."""
    shim(features=["audit"], strict=True)
    with pytest.raises(InconsistentPrecisionError, match="fp16"):
        build(checkpoints["float16"], "trainer.bf16=false")


@cases("skyrl", "megatron")
def test_keys_without_effect(
    fused_adam: str, checkpoints: dict[str, Path], shim: Any, case: Case
) -> None:
    hold(case, lambda: build(checkpoints["bfloat16"], *_words(case)))


@cases("skyrl", "fsdp")
def test_keys_without_effect_on_fsdp(
    cpu: None, checkpoints: dict[str, Path], shim: Any, case: Case
) -> None:
    hold(case, lambda: fsdp_worker("policy", checkpoints["float32"], None, *_words(case)))


def _words(case: Case) -> list[str]:
    return [f"trainer.policy.{key}={value}" for key, value in case.written.items()]
