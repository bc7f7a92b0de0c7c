"""slime's and miles' jobs in README and docs: their own parsers and Megatron's accept each."""

from __future__ import annotations

import pytest

from precision_shim.errors import PlanError
from precision_shim.planning import command
from precision_shim.process.settings import resolve
from precision_shim_adapters import flag_parsers

from ..page_jobs import Job, of

JOBS = [*of("slime"), *of("miles")]


def parsed(job: Job, *more: str) -> flag_parsers.Parsed:
    """The flags as the trainer's ``train.py`` reads them."""
    words = (*job.settings, *more)
    line = command.Job(job.framework, job.entry, None, (), words, {}, resolve(environ={}))
    return flag_parsers.parse(line)


@pytest.mark.usefixtures("tokenizers")
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_passes_its_trainers_validation(job: Job, name: str) -> None:
    if job.framework != name:
        pytest.skip(f"{job.framework} is not installed in this environment")
    found = parsed(job)
    args = found.args
    assert found.unknown == []
    assert args.load
    assert (args.fp16, args.bf16) == ("--fp16" in job.settings, "--fp16" not in job.settings)
    assert str(args.num_layers) == job.value("num-layers")
    with pytest.raises(PlanError, match="bf17"):
        parsed(job, "--exp-avg-dtype", "bf17")
