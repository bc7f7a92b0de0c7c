"""Predict what a job's driver reports on trainer and rollout."""

from __future__ import annotations

from precision_shim.precision.findings import Problem
from precision_shim_adapters.agreement.lm_head import Read, problems_of_heads
from precision_shim_adapters.agreement.report import FEATURE, JobEngines, problems_of

from .command import Job


def predict_sides(
    job: Job, where: str, both: JobEngines | None, group: str, heads: Read | None
) -> tuple[list[Problem], list[str]]:
    """Predict the driver's report on the dtypes of trainer and other engines, and on LM heads.

    ``where`` is framework and version, and ``group`` that of the driver's seams. ``both`` is
    ``None`` if dtypes are not compared; ``heads`` is ``None`` for a job without a rollout.
    """
    on = job.in_force(FEATURE, group)
    problems: list[Problem] = []
    notes: list[str] = []
    if heads is not None:
        problems, notes = problems_of_heads(where, heads, job.settings, on=on)
    if both is None or both.trainer is None:
        return problems, notes
    found, told = problems_of(where, both.trainer, both.others, job.settings, on=on)
    return [*found, *problems], [*told, *notes]
