"""ROLL's jobs in README and docs: ROLL's own config class accepts each."""

from __future__ import annotations

from pathlib import Path

import pytest

from precision_shim.errors import PlanError
from precision_shim_adapters import roll_plan

from ..page_jobs import Job, of
from . import jobs

JOBS = of("roll")


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_passes_rolls_validation(job: Job, tmp_path: Path) -> None:
    assert job.settings == jobs.WHERE
    script = jobs.write(tmp_path, jobs.config())
    with roll_plan._untouched():
        found = roll_plan._load(jobs.line(script, *job.settings), script)
    assert type(found).__name__ == "RLVRConfig"
    assert found.actor_train.world_size == 8
    script = jobs.write(tmp_path, {**jobs.config(), "actor_train": {"model_args": {"dtype": 16}}})
    with pytest.raises(PlanError, match="dtype"):
        roll_plan.plan_job(jobs.line(script, *job.settings))
