"""The dtypes of ROLL's trainer, reference model and rollout: the pipeline's report."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precision_shim
from precision_shim.errors import UnsupportedPrecisionError

from ..shim_warnings import watched
from . import jobs

NAMES = ("fp16", "bf16", "fp32")
PAIRS = [(trainer, rollout) for trainer in NAMES for rollout in NAMES]
LOST = ("fp16", "bf16")
STRATEGIES = ("megatron_train", "fsdp2_train")


class StopError(Exception):
    """Raised where the pipeline asks Ray for GPUs."""


def values(
    trainer: str,
    rollout: str,
    strategy: str = "megatron_train",
    *,
    ref: str = "",
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

    def started(given: dict[str, Any]) -> list[str]:
        config = from_dict(data_class=RLVRConfig, data=given)

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
        assert one.endswith("Write actor_infer.model_args.dtype=fp16.")


@pytest.mark.parametrize(("trainer", "rollout"), PAIRS)
def test_strict(shim: Any, start: Any, trainer: str, rollout: str) -> None:
    shim(frameworks="roll", strict=True, settings={"rollout": "follow"})
    if (trainer, rollout) == LOST:  # ROLL's config does not show what the user wrote
        with pytest.raises(UnsupportedPrecisionError, match=r"actor_infer\.model_args\.dtype=fp16"):
            start(values(trainer, rollout))
    else:
        assert start(values(trainer, rollout)) == []


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
