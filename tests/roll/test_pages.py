"""ROLL's jobs in README and docs: ROLL's own config class accepts each."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from ..pages.page_jobs import Job, of
from . import jobs

JOBS = of("roll")


def loaded(values: dict[str, Any]) -> Any:
    """The config that ROLL's script makes of the YAML's keys."""
    from dacite import from_dict
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig

    return from_dict(data_class=RLVRConfig, data=copy.deepcopy(values))


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_passes_rolls_validation(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dacite import WrongTypeError

    monkeypatch.chdir(tmp_path)  # ROLL's config makes a folder of logs
    assert job.settings == jobs.WHERE
    assert loaded(jobs.config()).actor_train.world_size == 8
    with pytest.raises(WrongTypeError, match="dtype"):
        loaded({**jobs.config(), "actor_train": {"model_args": {"dtype": 16}}})
