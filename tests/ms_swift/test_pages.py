"""ms-swift's jobs in README and docs: its own parser accepts each, and each key has an effect."""

from __future__ import annotations

from typing import Any

import pytest

from ..pages.page_jobs import Job, of
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
