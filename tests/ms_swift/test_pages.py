"""ms-swift's jobs in README and docs: its own parser accepts each, and each key has an effect."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ..documented import ROOT
from ..page_jobs import Job, of
from .cpu import ARGUMENTS, import_trainer

JOBS = of("ms-swift")


def parsed(job: Job, *more: str) -> Any:
    """The arguments as ``megatron`` parses them, before they look for a model and for GPUs."""
    from swift.cli._megatron.main import ROUTE_MAPPING
    from swift.megatron import arguments
    from transformers import HfArgumentParser

    assert job.launcher[-1] == "megatron"
    assert job.entry in ROUTE_MAPPING
    kinds = {"sft": "MegatronSftArguments", "rlhf": "MegatronRLHFArguments"}
    parser = HfArgumentParser(getattr(arguments, kinds[job.entry]))
    found, left = parser.parse_known_args([*job.settings, *more])
    assert left == []
    return found


@pytest.fixture(scope="module", autouse=True)
def arguments() -> None:
    import_trainer(ARGUMENTS)


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_passes_ms_swifts_validation(job: Job) -> None:
    found = parsed(job)
    for name in ("torch_dtype", "main_grads_dtype", "exp_avg_dtype", "model", "rlhf_type"):
        written = job.value(name)
        assert written is None or getattr(found, name) == written


@pytest.mark.parametrize("mode", ["colocate", "server", None])
def test_a_grpo_job_names_the_mode_of_its_rollout(
    mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method of ms-swift's trainer that makes its rollout engine, without a model."""
    from swift.megatron.trainers import rollout_mixin

    class Made(Exception):  # noqa: N818
        pass

    def make(*given: Any) -> None:
        raise Made

    kind = rollout_mixin.MegatronRolloutMixin
    monkeypatch.setattr(rollout_mixin, "is_vllm_available", lambda: True)
    for name in ("_init_rollout_params", "_prepare_scheduler"):
        monkeypatch.setattr(kind, name, lambda self: None)
    monkeypatch.setattr(kind, "_prepare_vllm_engine", make)
    (job,) = {job.settings: job for job in JOBS if job.value("rlhf_type") == "grpo"}.values()
    trainer = kind.__new__(kind)
    trainer.args = parsed(job)
    assert trainer.args.vllm_mode == "colocate"
    trainer.args.vllm_mode = mode
    trainer.world_size, trainer.is_main_process = 8, True
    trainer.vllm_client = SimpleNamespace(get_engine_type=make)
    with pytest.raises(Made if mode else ValueError, match="" if mode else "Invalid vllm_mode"):
        trainer._init_rollout_engine()


def test_the_rollouts_server_takes_the_dtype() -> None:
    from swift.arguments import RolloutArguments
    from transformers import HfArgumentParser

    page = (ROOT / "docs/start/ms-swift.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^swift rollout (.*)$", page, re.MULTILINE)
    found, left = HfArgumentParser(RolloutArguments).parse_known_args(line.split())
    assert (found.torch_dtype, left) == ("float16", [])


def test_a_job_that_ms_swift_does_not_take_is_noticed() -> None:
    with pytest.raises(SystemExit):
        parsed(JOBS[0], "--exp_avg_dtype", "bf17")
    with pytest.raises(AssertionError, match="no_such_key"):
        parsed(JOBS[0], "--no_such_key", "1")


@pytest.mark.parametrize("written", [True, False])
def test_with_ray_the_rollouts_dtype_is_a_key_of_its_own(tmp_path: Path, written: bool) -> None:
    """What ms-swift's driver starts vLLM with: the page's config, and the same without the key."""
    from swift.ray.megatron.driver_utils import merge_group_dict, parse_ray_yaml
    from swift.ray.megatron.rollout.replica import VllmEngineConfig

    page = (ROOT / "docs/start/ms-swift.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    config = tmp_path / "job.yaml"
    config.write_text(text if written else text.replace(", dtype: float16", ""), encoding="utf-8")
    _, groups, shared = parse_ray_yaml(config)
    made = VllmEngineConfig.from_rollout_cfg(merge_group_dict(shared, groups["rollout"]))
    assert shared["torch_dtype"] == "float16"
    assert made.to_launch_kwargs("hybrid")["dtype"] == ("float16" if written else "auto")
