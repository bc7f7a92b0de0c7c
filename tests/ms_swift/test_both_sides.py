"""The dtypes of trainer and rollout in the driver of ms-swift's Ray mode.

The driver, its YAML reader and its config of vLLM are real. A namespace replaces the arguments that
the driver parses for its dataset; in ``test_workers.py`` a whole job parses them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.errors import DtypeError, UnsupportedPrecisionError

from ..every_framework.shim_warnings import watched
from .cpu import ARGUMENTS, import_trainer
from .test_workers import arguments, model

__all__ = ["model"]

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
PAIRS = [("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "fp16")]
LOST = ("fp16", "bf16")
FOLLOW = {"rollout": "follow"}


class StopError(Exception):
    """Raised where the driver asks Ray for GPUs."""


@pytest.fixture
def drive(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts ms-swift's own driver up to its request for GPUs; returns it and our warnings."""
    import_trainer(ARGUMENTS)
    from swift.ray.megatron import resource_pool
    from swift.ray.megatron.pipeline import MegatronRayPipeline

    def stop(*args: Any, **named: Any) -> None:
        raise StopError

    monkeypatch.setattr(resource_pool, "ResourcePoolManager", stop)

    def started(trainer: str, *, fp16: bool = False, **rollout: Any) -> tuple[Any, list[str]]:
        own = {
            "rlhf_type": "grpo",
            "torch_dtype": DTYPES[trainer],
            "global_batch_size": 2,
            "num_generations": 2,
            "train": {"gpus": 1},
            "rollout": {"gpus": 1, **rollout},
        }
        written = {**arguments(tmp_path / "job", model, **own)}
        del written["external_plugins"], written["callbacks"]
        config = tmp_path / "job.yaml"  # JSON is YAML
        config.write_text(json.dumps(written, default=str), encoding="utf-8")
        made = MegatronRayPipeline(str(config))
        args = SimpleNamespace(torch_dtype=getattr(torch, DTYPES[trainer]))
        args.fp16, args.bf16 = fp16 or trainer == "fp16", trainer == "bf16"
        made._data_info = {"_driver_args": args}

        def build() -> None:
            with pytest.raises(StopError):
                made._create_pools()

        return made, watched(build)[1]

    return started


def decided(subject: str = "rollout") -> list[str]:
    return [
        one.chosen
        for one in precision_shim.status().decisions
        if (one.framework, one.subject, one.feature) == ("ms-swift", subject, "rollout-agreement")
    ]


def dtype_of(made: Any) -> str:
    """The dtype with which the driver starts vLLM."""
    from swift.ray.megatron.rollout.replica import VllmEngineConfig

    config = VllmEngineConfig.from_rollout_cfg(made.group_cfgs["rollout"])
    return str(config.to_launch_kwargs("hybrid")["dtype"])


@pytest.mark.parametrize(("trainer", "rollout"), PAIRS)
def test_the_driver_tells(shim: Any, drive: Any, trainer: str, rollout: str) -> None:
    shim(frameworks="ms-swift")
    made, told = drive(trainer, dtype=rollout)
    text = f"{rollout}, as the model"
    assert decided() == [text if trainer == rollout else f"{rollout} beside the model's {trainer}"]
    assert len(told) == ((trainer, rollout) == LOST)
    for one in told:
        assert "the model computes in fp16 (torch_dtype), the rollout in bf16 (rollout.dtype" in one
        assert "Write rollout.dtype=float16, or set PRECISION_SHIM_ROLLOUT=follow" in one
    assert dtype_of(made) == DTYPES[rollout]


@pytest.mark.parametrize("trainer", ["fp16", "bf16"])
def test_what_is_not_written_is_the_checkpoints_dtype(shim: Any, drive: Any, trainer: str) -> None:
    shim(frameworks="ms-swift")
    made, told = drive(trainer)
    assert len(told) == (trainer == "fp16")  # the checkpoint's dtype is bf16
    assert dtype_of(made) == "auto"
    precision_shim.uninstall()
    shim(frameworks="ms-swift", settings=FOLLOW, strict=True)
    made, told = drive(trainer)
    assert (dtype_of(made), told) == ("auto" if trainer == "bf16" else DTYPES[trainer], [])
    assert decided() == [f"{trainer}, as the model"]


@pytest.mark.parametrize("over", [False, True])
def test_follow_replaces_what_stands_there(shim: Any, drive: Any, over: bool) -> None:
    """``vllm_engine_kwargs`` override the rollout's own key."""
    shim(frameworks="ms-swift", settings=FOLLOW, strict=True)
    given = {"vllm_engine_kwargs": {"dtype": "BF16"}} if over else {"dtype": "bf16"}
    made, told = drive("fp16", **given)
    assert (dtype_of(made), told) == ("float16", [])
    assert decided() == ["fp16, as the model"]
    key = "rollout.vllm_engine_kwargs.dtype" if over else "rollout.dtype"
    assert decided("dtype keys") == [f"{key}: bfloat16 -> float16"]


def test_strict_and_names(shim: Any, drive: Any) -> None:
    shim(frameworks="ms-swift", strict=True)
    with pytest.raises(UnsupportedPrecisionError, match=r"Write rollout\.dtype=float16"):
        drive("fp16", dtype="bf16")
    with pytest.raises(DtypeError, match=r"rollout\.dtype='bf17' is no dtype"):
        drive("fp16", dtype="bf17")
    assert dtype_of(drive("fp16", dtype="Half")[0]) == "float16"
    over = {"dtype": "bf16", "vllm_engine_kwargs": {"dtype": "FP16"}}
    assert dtype_of(drive("fp16", **over)[0]) == "float16"


def test_a_trainer_in_fp32_is_in_fp16_unless_the_user_forbids_it(shim: Any, drive: Any) -> None:
    shim(frameworks="ms-swift")
    (told,) = drive("fp32", fp16=True, dtype="bf16")[1]
    assert "the model computes in fp16 (torch_dtype), the rollout in bf16" in told


def test_off_nothing_is_said(shim: Any, drive: Any) -> None:
    shim(frameworks="ms-swift", features="-rollout-agreement", settings=FOLLOW)
    made, told = drive("fp16", dtype="bfloat16")
    assert (dtype_of(made), told, decided()) == ("bfloat16", [], [])


def test_an_lm_head_in_fp32_is_refused(shim: Any, drive: Any) -> None:
    shim(frameworks="ms-swift", settings={"head": "fp32"})
    (told,) = drive("bf16", dtype="bf16")[1]
    assert told.startswith("ms-swift 4.6.0: PRECISION_SHIM_HEAD=fp32 is refused")
