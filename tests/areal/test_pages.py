"""In README and docs each AReaL job passes AReaL's own loader, and each key has an effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..pages.page_jobs import Job, of

JOBS = of("areal")
YAML = """
experiment_name: tests
trial_name: one
tokenizer_path: none
total_train_epochs: 1
scheduler: {type: null}
actor:
  backend: "megatron:d4p1t1"
  experiment_name: tests
  trial_name: one
  path: none
  dtype: bfloat16
  optimizer: {type: adam, gradient_clipping: 1.0}
rollout: {backend: "sglang:d4p1t1", experiment_name: tests, trial_name: one}
sglang: {dtype: "${actor.dtype}"}
vllm: {dtype: "${actor.dtype}"}
train_dataset: {batch_size: 256, path: none, type: rl}
cluster: {fileroot: none}
saver: {experiment_name: tests, trial_name: one, fileroot: none}
recover: {experiment_name: tests, trial_name: one, fileroot: none}
evaluator: {experiment_name: tests, trial_name: one, fileroot: none}
stats_logger: {experiment_name: tests, trial_name: one, fileroot: none}
"""
"""The keys of AReaL's example config that the jobs override; AReaL's wheel lacks the example."""


def loaded(settings: tuple[str, ...], folder: Path) -> Any:
    """The config that ``load_expr_config`` makes before it writes files."""
    from areal.api.cli_args import GRPOConfig, parse_cli_args, to_structured_cfg
    from omegaconf import OmegaConf

    words = list(settings)
    at = words.index("--config") + 1
    assert words[at] == "examples/math/gsm8k_grpo_megatron.yaml"
    words[at] = str(folder / "example.yaml")
    (folder / "example.yaml").write_text(YAML)
    config, _ = parse_cli_args(words)
    return OmegaConf.to_object(to_structured_cfg(config, config_cls=GRPOConfig))


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_passes_areals_validation(job: Job, tmp_path: Path) -> None:
    config = loaded(job.settings, tmp_path)
    actor = config.actor
    assert config.sglang.dtype == config.vllm.dtype == actor.dtype
    written = (job.value("actor.optimizer.type"), job.value("actor.dtype"))
    assert any(written)
    assert actor.optimizer.type == (written[0] or "adam")
    assert actor.dtype == (written[1] or "bfloat16")
