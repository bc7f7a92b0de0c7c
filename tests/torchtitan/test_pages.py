"""torchtitan's own config accepts its jobs in README and docs; float16 needs the shim."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from ..pages.page_jobs import Job, of
from .absent import standing_in

JOBS = of("torchtitan")
RL = "torchtitan.experiments.rl.train"


@pytest.fixture(autouse=True)
def importable(torchtitan: None) -> Iterator[None]:
    """Stand in for vLLM and the renderers while a config is read."""
    with standing_in("vllm", "renderers"):
        yield


def validated(job: Job) -> Any:
    """The config that torchtitan's manager and checks accept for the job's number of GPUs."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    config = ConfigManager().parse_args(list(job.settings))
    trainer = config.trainer if job.entry == RL else config
    world = [word.partition("=")[2] for word in job.launcher if word.startswith("--nproc_per_node")]
    if job.entry == RL:
        from torchtitan.experiments.rl.train import _compute_trainer_world_size

        world = [str(_compute_trainer_world_size(trainer.parallelism))]
    ParallelDims.from_config(trainer.parallelism, int(world[0]))
    return config


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_passes_torchtitans_validation(
    job: Job, shim: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert importlib.util.find_spec(job.entry)
    half = any("float16" in word and "bfloat16" not in word for word in job.settings)
    if half:  # docs: torchtitan alone refuses float16
        with pytest.raises(SystemExit):
            validated(job)
        assert "invalid choice" in capsys.readouterr().err
        shim()
    config = validated(job)
    trainer = config.trainer if job.entry == RL else config
    dtype = "float16" if half else "bfloat16"
    assert trainer.training.mixed_precision_param == dtype
    if job.entry == RL:
        assert config.generator.model_dtype == dtype
        assert config.metrics.enable_wandb is False, "it asks for an account"
