"""The audit of SkyRL's Megatron worker: alone, with the other features, and under strict."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import precision_shim
from precision_shim.errors import InconsistentPrecisionError

from ..every_framework.shim_warnings import ours
from ..every_framework.without_effect import Case, cases, hold
from ..processes.commands import command
from .conftest import SKYRL
from .support import build, fsdp_worker

MEGATRON = "trainer.policy.megatron_config"
OF_REF = "trainer.ref.megatron_config"
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


BF16_MOMENT = "trainer.ref.megatron_config.optimizer_config_kwargs.exp_avg_dtype=bf16"


@pytest.mark.parametrize(
    ("role", "word", "remedy"),
    [
        ("critic", "trainer.critic.fsdp_config.mixed_precision.buffer_dtype=bf16", "Leave"),
        ("ref", BF16_MOMENT, "Write trainer.strategy=megatron"),
        ("ref", f"{OF_REF}.ddp_config.grad_reduce_in_fp32=False", "Write trainer.strategy="),
    ],
)
def test_other_models_on_fsdp_tell_their_keys(
    cpu: None, checkpoints: dict[str, Path], shim: Any, role: str, word: str, remedy: str
) -> None:
    told = f"{word} has no effect: nothing reads this key. {remedy}"
    tell(shim, told, lambda: fsdp_worker(role, checkpoints["float32"], None, word))


def test_dropped_workers_leave_no_audit(cpu: None, checkpoints: dict[str, Path], shim: Any) -> None:
    shim()
    for dtype in ("bf16", "fp16"):
        fsdp_worker("policy", checkpoints["float32"], dtype)
    gc.collect()
    assert not precision_shim.status().audit


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_megatrons_flag_on_fsdp(
    cpu: None, checkpoints: dict[str, Path], shim: Any, role: str
) -> None:
    """It is told only where the job has no reference model, which is stored in its dtype."""

    def make(*more: str) -> Any:
        return fsdp_worker(role, checkpoints["float32"], None, "trainer.bf16=false", *more)

    told = "trainer.bf16=False has no effect: the layers compute in bf16. Leave trainer.bf16 out"
    tell(shim, told, lambda: make("trainer.algorithm.use_kl_loss=false"))
    precision_shim.uninstall()
    shim(strict=True)
    with ours() as said:
        make("trainer.algorithm.use_kl_loss=true")
        reference = fsdp_worker("ref", checkpoints["float32"], None, "trainer.bf16=false")
    assert not any("no effect" in one for one in said)
    assert {one.dtype for one in reference.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("word", "found"),
    [
        (BF16_MOMENT, "nothing reads this key"),
        (f"{OF_REF}.transformer_config_kwargs.params_dtype=fp32", "the parameters are bf16"),
        ("trainer.ref.fsdp_config.mixed_precision.param_dtype=fp16", "the parameters are bf16"),
    ],
)
def test_the_reference_model_on_megatron_tells_its_keys(
    fused_adam: str, checkpoints: dict[str, Path], shim: Any, word: str, found: str
) -> None:
    told = f"{word} has no effect: {found}"
    tell(shim, told, lambda: build(checkpoints["bfloat16"], word, role="ref"))


def test_a_models_own_dtype_on_megatron(
    fused_adam: str, checkpoints: dict[str, Path], shim: Any
) -> None:
    """Up to 0.3 it wins over ``trainer.bf16=false``; plan and worker say whether it does."""
    key = f"{MEGATRON}.transformer_config_kwargs.params_dtype"
    words = ("trainer.bf16=false", f"{key}=bf16")
    shim()
    with ours() as said:
        worker = build(checkpoints["float32"], *words)
    held = {one.dtype for chunk in worker.actor_module for one in chunk.parameters()}
    path = f"trainer.policy.model.path={checkpoints['float32']}"
    line = ("python3", "-m", "skyrl.train.entrypoints.main_base", "trainer.strategy=megatron")
    out = command("plan", "--parameters", "1M", "--json", "--", *line, path, *words)[1]
    plan = json.loads(out)
    told = f"{key}=bf16 has no effect: the parameters are fp32. Write trainer.bf16=true"
    wins = Version("0.4") > SKYRL
    # Without Megatron's wrapper for 16 bits the norms stay fp32.
    assert (torch.bfloat16 in held, plan["models"][0]["computes"] == "bf16") == (wins, wins)
    assert any(told in one for one in said) != wins
    assert [one["key"] for one in plan["problems"]] == ([] if wins else [key])


def tell(shim: Any, told: str, make: Callable[[], object]) -> None:
    """A worker with a key without effect warns, and raises under strict."""
    shim()
    with ours() as said:
        make()
    assert sum(told in one for one in said) == 1, said
    precision_shim.uninstall()
    shim(strict=True)
    with ours(), pytest.raises(InconsistentPrecisionError, match=re.escape(told)):
        make()
