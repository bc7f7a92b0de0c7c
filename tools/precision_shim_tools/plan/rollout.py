"""Predict what a job's driver reports on trainer and rollout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from precision_shim.precision.findings import Findings, Problem
from precision_shim_adapters.agreement.report import FEATURE, Sides

from .command import Job


def predict_sides(job: Job, sides: Sides, group: str) -> tuple[Findings, dict[str, Any]]:
    """Predict what ``report_sides`` reports, and the keys that it writes.

    ``group`` is that of the driver's seams. If they are not in force, the shim writes no key, and
    changes no LM head.
    """
    on = job.in_force(FEATURE, group)
    sides = sides if on else replace(sides, heads=())
    return sides.judge(job.settings, may_write=on, here=False)


def listed(findings: Findings) -> tuple[list[Problem], list[str]]:
    """The plan's problems, and its notes on the decisions."""
    decided = findings.decisions
    notes = [f"{one.subject}: {one.feature}: {one.chosen} ({one.because})" for one in decided]
    return list(findings.problems), notes
