"""Predict for ``precision-shim plan`` the driver's report about a job's engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from precision_shim.planning.record import Problem
from precision_shim.precision.agreement import Engine, compare
from precision_shim.process.settings import Settings

from .telling import FEATURE, FOLLOWED, follows, message_of


def problems_of(
    where: str,
    trainer: Engine,
    others: Sequence[Engine],
    settings: Settings,
    *,
    on: bool,
    model_type: str = "",
) -> tuple[list[Problem], list[str]]:
    """Return the warnings of ``settle`` as problems, and one note for each engine in ``others``.

    Args:
        where: framework and version.
        trainer: the trained policy.
        others: the job's other engines.
        settings: the shim's settings for the job.
        on: whether ``rollout-agreement`` is in force; if not, the shim changes no engine's dtype.
        model_type: the model's type in its HF config; empty if unknown.
    """
    problems, notes = [], []
    for other in others:
        if on and follows(trainer, other, model_type, settings["rollout"]):
            other = replace(other, computes=trainer.computes, because=FOLLOWED)  # noqa: PLW2901
        verdict = compare(trainer, other, model_type)
        notes.append(f"{other.subject}: {FEATURE}: {verdict.chosen} ({verdict.because})")
        if verdict.lost:
            message, remedy = message_of(where, trainer, verdict, settings["rollout"])
            problems.append(Problem("rollout-dtype", other.subject, other.key, message, remedy))
    return problems, notes
