"""The dtypes of ROLL's trainer, reference model and rollout: the pipeline's report."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precision_shim
from precision_shim.errors import UnsupportedPrecisionError

from ..every_framework.shim_warnings import watched
from . import jobs

PAIRS = [("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "fp16")]
LOST = ("fp16", "bf16")
STRATEGIES = ("megatron_train", "fsdp2_train")


configs: list[Any] = []
"""The configs of the pipelines that a test started."""


class StopError(Exception):
    """Raised where the pipeline asks Ray for GPUs."""


def values(
    trainer: str, rollout: str, strategy: str = "megatron_train", *, ref: str = ""
) -> dict[str, Any]:
    """A job's config; ``ref``: the dtype of a reference model on Megatron."""
    found = copy.deepcopy(jobs.config(trainer, strategy))
    found["actor_infer"]["model_args"]["dtype"] = rollout
    if strategy == "fsdp2_train":
        found["actor_train"]["strategy_args"]["strategy_config"] = {"param_dtype": trainer}
    if ref:
        there = {"strategy_name": "megatron_infer", "strategy_config": {}}
        found["reference"] = {
            "model_args": {"dtype": ref},
            "strategy_args": there,
            "device_mapping": "list(range(0,8))",
        }
    return found


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], list[str]]:
    """Starts ROLL's own pipeline up to its request for GPUs; returns the shim's warnings."""
    from dacite import from_dict
    from roll.pipeline import base_pipeline
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig

    monkeypatch.chdir(tmp_path)

    def stop(**given: Any) -> None:
        raise StopError

    monkeypatch.setattr(base_pipeline, "ResourceManager", stop)
    configs.clear()

    def started(given: dict[str, Any]) -> list[str]:
        config = from_dict(data_class=RLVRConfig, data=given)
        configs.append(config)

        def build() -> None:
            with pytest.raises(StopError):
                base_pipeline.BasePipeline(config)

        return watched(build)[1]

    return started


def decided(subject: str = "rollout") -> list[str]:
    return [
        one.chosen
        for one in precision_shim.status().decisions
        if (one.framework, one.subject, one.feature) == ("roll", subject, "rollout-agreement")
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("trainer", "rollout"), PAIRS)
def test_the_pipeline_tells(
    shim: Any, start: Any, trainer: str, rollout: str, strategy: str
) -> None:
    shim(frameworks="roll")
    told = start(values(trainer, rollout, strategy))
    same = trainer == rollout
    text = f"{rollout}, as the actor" if same else f"{rollout} beside the actor's {trainer}"
    assert decided() == [text]
    assert len(told) == ((trainer, rollout) == LOST)
    key = "model_args.dtype" if strategy == "megatron_train" else "param_dtype"
    for one in told:
        assert one.startswith("roll 0.3.0: the actor computes in fp16 (actor_train.")
        assert f"{key}), the rollout in bf16" in one
        assert "Write actor_infer.model_args.dtype=fp16, or set PRECISION_SHIM_ROLLOUT" in one


def test_strict(shim: Any, start: Any) -> None:
    shim(frameworks="roll", strict=True)
    with pytest.raises(UnsupportedPrecisionError, match=r"actor_infer\.model_args\.dtype=fp16"):
        start(values("fp16", "bf16"))
    assert start(values("fp16", "fp16")) == []


@pytest.mark.parametrize(("trainer", "other"), [("fp16", "bf16"), ("bf16", "fp16")])
def test_follow_replaces_what_stands_there(shim: Any, start: Any, trainer: str, other: str) -> None:
    import torch

    shim(frameworks="roll", strict=True, settings={"rollout": "follow"})
    assert start(values(trainer, other, ref=other)) == []
    assert decided() == decided("ref") == [f"{trainer}, as the actor"]
    names = [f"{worker}.model_args.dtype" for worker in ("actor_infer", "reference")]
    assert decided("dtype keys") == ["; ".join(f"{key}: {other} -> {trainer}" for key in names)]
    ref = configs[0].reference
    assert configs[0].actor_infer.model_args.dtype == ref.model_args.dtype == trainer
    # ROLL reads these when it builds a model, and made them from the dtype before the shim.
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[trainer]
    assert ref.model_args.compute_dtype is dtype
    assert (ref.training_args.fp16, ref.training_args.bf16) == (
        trainer == "fp16",
        trainer != "fp16",
    )


def test_follow_replaces_the_dtype_of_a_reference_model_on_fsdp2(shim: Any, start: Any) -> None:
    shim(frameworks="roll", strict=True, settings={"rollout": "follow"})
    given = values("fp16", "fp16", "fsdp2_train", ref="bf16")
    given["reference"]["strategy_args"] = {"strategy_name": "fsdp2_infer", "strategy_config": {}}
    assert start(given) == []
    config = configs[0].reference.strategy_args.strategy_config
    assert config == {"param_dtype": "fp16"}
    key = "reference.strategy_args.strategy_config.param_dtype"
    assert decided("dtype keys") == [f"{key}: bf16 -> fp16"]


def test_the_reference_model(shim: Any, start: Any) -> None:
    shim(frameworks="roll")
    (told,) = start(values("fp16", "fp16", ref="bf16"))
    assert "the ref in bf16 (reference.model_args.dtype" in told
    assert start({**values("fp16", "fp16", ref="bf16"), "enable_reference": False}) == []
    assert start(values("fp16", "fp16", ref="fp16")) == []


def test_an_lm_head_in_fp32_is_refused(shim: Any, start: Any) -> None:
    shim(frameworks="roll", settings={"head": "fp32"})
    (told,) = start(values("bf16", "bf16"))
    assert told.startswith("roll 0.3.0: PRECISION_SHIM_HEAD=fp32 is refused")
    assert told.endswith("The shim changes no LM head. Unset PRECISION_SHIM_HEAD.")


@pytest.mark.parametrize("dtype", [None, "float13"])
def test_a_dtype_that_is_not_known_here_is_not_compared(shim: Any, start: Any, dtype: Any) -> None:
    """ROLL takes the checkpoint's dtype for null, and the worker refuses a name that is none."""
    shim(frameworks="roll", strict=True)
    given = values("fp16", "bf16", "fsdp2_train")
    given["actor_train"]["strategy_args"]["strategy_config"]["param_dtype"] = dtype
    assert start(given) == decided() == []


def test_off_nothing_is_said(shim: Any, start: Any) -> None:
    shim(frameworks="roll", features="-rollout-agreement")
    assert start(values("fp16", "bf16")) == decided() == []
