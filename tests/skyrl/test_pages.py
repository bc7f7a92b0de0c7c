"""SkyRL's validation accepts the jobs in README and docs, and the jobs' keys have an effect."""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.metadata import metadata
from typing import Any

import pytest

from ..pages.page_jobs import Job, of

JOBS = of("skyrl")


@pytest.fixture(autouse=True)
def as_on_a_new_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the Weights & Biases key; stand in for flash-attn, which SkyRL's extras install."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if importlib.util.find_spec("flash_attn") is None:  # SkyRL 0.2.0 reads its version
        stand_in = types.ModuleType("flash_attn")
        stand_in.__version__ = "2.8.1"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn", stand_in)


def validated(settings: tuple[str, ...]) -> Any:
    """The config after the validation that SkyRL's entry point runs before it starts Ray."""
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils.utils import validate_cfg

    config = SkyRLTrainConfig.from_cli_overrides(list(settings))
    validate_cfg(config)
    return config


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_passes_skyrls_validation(job: Job) -> None:
    assert importlib.util.find_spec(job.entry)
    config = validated(job.settings)
    megatron = config.trainer.strategy == "megatron"
    for part in ("megatron_config", "fsdp_config"):
        if any(f".{part}." in word for word in job.settings):
            assert megatron == (part == "megatron_config"), f"nothing else reads {part}"
    (extra,) = (job.launcher[at + 1] for at, one in enumerate(job.launcher) if one == "--extra")
    assert extra == ("megatron" if megatron else "fsdp")
    assert extra in metadata("skyrl").get_all("Provides-Extra", [])


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_both_sides_of_a_job_compute_in_one_dtype(job: Job) -> None:
    config = validated(job.settings)
    dtypes = {config.generator.inference_engine.model_dtype}
    for section in (config.trainer.policy, config.trainer.ref):
        mixed = section.fsdp_config.mixed_precision
        half = mixed is not None and mixed.param_dtype == "fp16"
        dtypes.add("float16" if half else "bfloat16")
    assert len(dtypes) == 1, dtypes
