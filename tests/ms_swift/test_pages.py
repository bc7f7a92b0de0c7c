"""ms-swift's jobs on README and docs: its own parser takes each, and their keys have an effect."""

from __future__ import annotations

from typing import Any

import pytest

from ..page_jobs import Job, of
from .cpu import ARGUMENTS, import_trainer

JOBS = of("ms-swift")


def parsed(settings: tuple[str, ...]) -> Any:
    """The arguments as ``megatron`` parses them, before they look for a model and for GPUs."""
    from swift.cli._megatron.main import ROUTE_MAPPING
    from swift.megatron import arguments
    from transformers import HfArgumentParser

    assert settings[0] in ROUTE_MAPPING
    kinds = {"sft": "MegatronSftArguments", "rlhf": "MegatronRLHFArguments"}
    parser = HfArgumentParser(getattr(arguments, kinds[settings[0]]))
    found, left = parser.parse_known_args(list(settings[1:]))
    assert left == []
    return found


@pytest.fixture(scope="module", autouse=True)
def arguments() -> None:
    import_trainer(ARGUMENTS)


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_passes_ms_swifts_validation(job: Job) -> None:
    found = parsed(job.settings)
    for name in ("torch_dtype", "main_grads_dtype", "exp_avg_dtype", "model", "rlhf_type"):
        written = job.value(name)
        assert written is None or getattr(found, name) == written


def test_a_job_that_ms_swift_does_not_take_is_noticed() -> None:
    with pytest.raises(SystemExit):
        parsed((*JOBS[0].settings, "--exp_avg_dtype", "bf17"))
    with pytest.raises(AssertionError, match="no_such_key"):
        parsed((*JOBS[0].settings, "--no_such_key", "1"))
