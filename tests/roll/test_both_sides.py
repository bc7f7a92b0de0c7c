"""The dtypes of ROLL's trainer, reference model and rollout: the pipeline's report."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from ..every_framework.both_sides import (
    FOLLOW,
    SHORT,
    BothSides,
    NoHead,
    Routers,
    Sides,
    StopError,
    stop,
)
from . import jobs
from .test_pages import loaded


class Roll(Sides):
    """ROLL's own pipeline, up to its request for GPUs."""

    framework = "roll"
    names, written = SHORT, "bf16"
    key = "actor_infer.model_args.dtype"

    def __init__(self, strategy: str = "megatron_train") -> None:
        self.strategy = strategy

    def job(self, trainer: str, rollout: str, *more: str) -> dict[str, Any]:
        """A job's config; ``more``: the dtype of a reference model on Megatron."""
        found = copy.deepcopy(jobs.config(trainer, self.strategy))
        found["actor_infer"]["model_args"]["dtype"] = rollout
        if self.strategy == "fsdp2_train":
            found["actor_train"]["strategy_args"]["strategy_config"] = {"param_dtype": trainer}
        for ref in more:
            found["reference"] = {
                "model_args": {"dtype": ref},
                "strategy_args": {"strategy_name": "megatron_infer", "strategy_config": {}},
                "device_mapping": "list(range(0,8))",
            }
        return found

    def routers(self) -> dict[str, str]:
        return {
            "": "not known here (actor_train.strategy_args.strategy_config.moe_router_dtype is not",
            "fp64": "bf16 beside the actor's fp64",
        }

    def routed(self, model: Path, *more: str) -> dict[str, Any]:
        found = self.job("bf16", "bf16")
        for one in more:
            given = {"additional_configs": {"moe_router_dtype": one}}
            found["actor_train"]["strategy_args"]["strategy_config"] |= given
        return {**found, "pretrain": str(model)}

    def served_in_fp32(self) -> dict[str, Any]:
        found = self.job("bf16", "bf16")
        given = {"hf_overrides": {"head_dtype": "float32"}}
        found["actor_infer"]["strategy_args"] = {"strategy_name": "vllm", "strategy_config": given}
        return found

    def run(self, job: dict[str, Any]) -> Any:
        from roll.pipeline import base_pipeline

        config = loaded(job)
        with pytest.raises(StopError):
            base_pipeline.BasePipeline(config)
        return config

    def handed(self, made: Any) -> str:
        return str(made.actor_infer.model_args.dtype)


@pytest.fixture(autouse=True)
def no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from roll.pipeline import base_pipeline

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base_pipeline, "ResourceManager", stop)


class TestBothSides(BothSides, NoHead):
    @pytest.fixture(params=["megatron_train", "fsdp2_train"])
    def sides(self, request: pytest.FixtureRequest) -> Roll:
        return Roll(request.param)


class TestRouters(Routers):
    @pytest.fixture
    def sides(self) -> Roll:
        return Roll()


@pytest.mark.parametrize(("trainer", "other"), [("fp16", "bf16"), ("bf16", "fp16")])
def test_follow_replaces_the_dtype_of_a_reference_model(
    shim: Any, trainer: str, other: str
) -> None:
    shim(frameworks="roll", strict=True, settings=FOLLOW)
    sides = Roll()
    found = sides.start(sides.job(trainer, other, other))
    keys = [f"{worker}.model_args.dtype" for worker in ("actor_infer", "reference")]
    assert (found.told, found.chosen) == (
        [],
        {
            **dict.fromkeys(("ref", "rollout"), f"{trainer}, as the actor"),
            "dtype keys": "; ".join(f"{key}: {other} -> {trainer}" for key in keys),
        },
    )
    ref = found.made.reference
    assert found.made.actor_infer.model_args.dtype == ref.model_args.dtype == trainer
    # ROLL reads these when it builds a model, and made them from the dtype before the shim.
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[trainer]
    assert ref.model_args.compute_dtype is dtype
    half = trainer == "fp16"
    assert (ref.training_args.fp16, ref.training_args.bf16) == (half, not half)


def test_follow_replaces_the_dtype_of_a_reference_model_on_fsdp2(shim: Any) -> None:
    shim(frameworks="roll", strict=True, settings=FOLLOW)
    sides = Roll("fsdp2_train")
    given = sides.job("fp16", "fp16", "bf16")
    given["reference"]["strategy_args"] = {"strategy_name": "fsdp2_infer", "strategy_config": {}}
    found = sides.start(given)
    assert found.told == []
    assert found.made.reference.strategy_args.strategy_config == {"param_dtype": "fp16"}
    key = "reference.strategy_args.strategy_config.param_dtype"
    assert found.chosen["dtype keys"] == f"{key}: bf16 -> fp16"


def test_the_reference_model(shim: Any) -> None:
    shim(frameworks="roll")
    sides = Roll()
    job = sides.job("fp16", "fp16", "bf16")
    (told,) = sides.start(job).told
    assert "the ref in bf16 (reference.model_args.dtype" in told
    assert sides.start({**job, "enable_reference": False}).told == []
    assert sides.start(sides.job("fp16", "fp16", "fp16")).told == []


@pytest.mark.parametrize("dtype", [None, "float13"])
def test_a_dtype_that_is_not_known_here_is_not_compared(shim: Any, dtype: Any) -> None:
    """ROLL takes the checkpoint's dtype for null, and the worker refuses a name that is none."""
    shim(frameworks="roll", strict=True)
    sides = Roll("fsdp2_train")
    job = sides.job("fp16", "bf16")
    job["actor_train"]["strategy_args"]["strategy_config"]["param_dtype"] = dtype
    found = sides.start(job)
    assert (found.told, found.chosen) == ([], {})


BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
TRAINED = "weights in fp8 e4m3 (blocks of 128x128), activations{} in fp8 e4m3 (blocks of 1x128)"


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, f"bf16 beside the actor's bf16 with {TRAINED.format(' and gradients')}"),
        ({"quantization": "fp8", "hf_overrides": BLOCKS}, f"{TRAINED.format('')}, as the actor"),
        ({"quantization": "fp8"}, "fp8 beside the actor's, quantized differently"),
    ],
)
def test_quantized_layers(shim: Any, options: dict[str, Any], chosen: str) -> None:
    shim(frameworks="roll")
    sides = Roll()
    job = sides.job("bf16", "bf16", "bf16")
    given = {"fp8": "e4m3", "additional_configs": {"fp8_recipe": "blockwise"}}
    job["actor_train"]["strategy_args"]["strategy_config"] |= given
    job["actor_infer"]["strategy_args"]["strategy_config"] = options
    found = sides.start(job)
    place = "actor_train.strategy_args.strategy_config"
    assert found.chosen["rollout"] == chosen
    assert all(f"{place}.fp8=e4m3, {place}.fp8_recipe=blockwise" in note for note in found.notes)
    assert "with weights" in found.chosen["ref"]  # which computes in bf16
