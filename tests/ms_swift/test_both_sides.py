"""The dtypes of trainer and rollout in the driver of ms-swift's Ray mode.

The driver, its YAML reader and its config of vLLM are real. A namespace replaces the arguments that
the driver parses for its dataset; in ``test_workers.py`` a whole job parses them.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ..every_framework import both_sides as both
from .cpu import ARGUMENTS, import_trainer
from .test_workers import arguments, model

__all__ = ["model"]


class Swift(both.Sides):
    """ms-swift's own driver, up to its request for GPUs."""

    framework, model, key = "ms-swift", "model", "rollout.dtype"

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.folder, self.checkpoint = folder, checkpoint

    def job(self, trainer: str, rollout: str, *more: str, **keys: Any) -> Any:
        """The YAML's dict, and the driver's arguments; ``more`` has fp16 if these set the flag."""
        own = {
            "rlhf_type": "grpo",
            "torch_dtype": both.DTYPES[trainer],
            "global_batch_size": 2,
            "num_generations": 2,
            "train": {"gpus": 1},
            "rollout": {"gpus": 1, **({"dtype": rollout} if rollout else {}), **keys},
        }
        written = {**arguments(self.folder / "job", self.checkpoint, **own)}
        del written["external_plugins"], written["callbacks"]
        args = SimpleNamespace(torch_dtype=getattr(torch, both.DTYPES[trainer]))
        args.fp16, args.bf16 = "fp16" in (trainer, *more), trainer == "bf16"
        vars(args).update(word.split("=") for word in more if "=" in word)
        return written, args

    def routers(self) -> dict[str, str]:
        return {
            "moe_router_dtype=fp32": "bf16 beside the model's fp32 (moe_router_dtype=fp32; vllm",
            "moe_router_dtype=none": "bf16, as the model",
        }

    def routed(self, model: Path, *more: str) -> Any:
        return Swift(self.folder, model).job("bf16", "bf16", *more)

    def served_in_fp32(self) -> Any:
        given = {"hf_overrides": {"head_dtype": "float32"}}
        return self.job("bf16", "bf16", vllm_engine_kwargs=given)

    def run(self, job: Any) -> Any:
        from swift.ray.megatron.pipeline import MegatronRayPipeline

        written, args = job
        config = self.folder / "job.yaml"  # JSON is YAML
        config.write_text(json.dumps(written, default=str), encoding="utf-8")
        made = MegatronRayPipeline(str(config))
        made._data_info = {"_driver_args": args}
        with pytest.raises(both.StopError):
            made._create_pools()
        return made

    def handed(self, made: Any) -> str:
        """The dtype with which the driver starts vLLM."""
        from swift.ray.megatron.rollout.replica import VllmEngineConfig

        config = VllmEngineConfig.from_rollout_cfg(made.group_cfgs["rollout"])
        return str(config.to_launch_kwargs("hybrid")["dtype"])


@pytest.fixture
def sides(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Swift:
    import_trainer(ARGUMENTS)
    from swift.ray.megatron import resource_pool

    monkeypatch.setattr(resource_pool, "ResourcePoolManager", both.stop)
    return Swift(tmp_path, model)


AGREED = "fp16, as the model"


class TestBothSides(both.BothSides, both.Names, both.NoHead, both.Routers):
    pass


LOST = "bf16 beside the model's fp16"
TOLD = ("the model computes in fp16 (torch_dtype), the rollout in bf16",)
KEY = "rollout.vllm_engine_kwargs.dtype"


def over(dtype: str) -> dict[str, Any]:
    """Keys of the rollout's group that go over its own dtype."""
    return {"vllm_engine_kwargs": {"dtype": dtype}}


@both.each(
    the_checkpoints_dtype=both.Row("fp16 -", LOST, TOLD, "auto"),
    bf16=both.Row("bf16 -", "bf16, as the model", handed="auto"),
    bf16_follows=both.Row("bf16 -", "bf16, as the model", handed="auto", follow=""),
    follow=both.Row("fp16 -", AGREED, follow="rollout.dtype: not set -> float16"),
    over=both.Row("fp16 -", AGREED, follow=f"{KEY}: bfloat16 -> float16", model=over("BF16")),
    over_the_key=both.Row("fp16 bf16", AGREED, model=over("FP16")),
    fp8=both.Row(
        "bf16 bf16 fp8=hybrid fp8_recipe=delayed",
        "bf16 beside the model's bf16 with weights and activations in fp8 e4m3 (delayed per "
        "tensor), gradients in fp8 e5m2 (delayed per tensor)",
        because="fp8_format=hybrid, fp8_recipe=delayed",
    ),
    fp8_in_both=both.Row(
        "bf16 bf16 fp8=e4m3 fp8_recipe=blockwise",
        "weights in fp8 e4m3 (blocks of 128x128), activations in fp8 e4m3 (blocks of 1x128), as "
        "the model",
        handed="bfloat16",
        because="rollout.vllm_engine_kwargs.quantization=fp8_per_block",
        model={"vllm_engine_kwargs": {"quantization": "fp8_per_block"}},
    ),
    # ms-swift computes in fp16, unless the user forbids it.
    a_trainer_in_fp32=both.Row("fp32 bf16 fp16", LOST, TOLD),
)
class TestRows(both.Rows):
    pass
