"""Copy the trainer's dtype to a job's other engines on request, and report different dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from precision_shim.adapting import current_settings, decide, warn
from precision_shim.errors import UnsupportedPrecisionError
from precision_shim.precision.agreement import Engine, Verdict, compare, value_to_follow
from precision_shim.precision.findings import Problem
from precision_shim.process.settings import Settings
from precision_shim.reporting.journal import decisions

FEATURE = "rollout-agreement"

Write = Callable[[str, str], object]
"""A function that sets a key of the job's config to a value such as ``"float16"``."""

FOLLOWED = "PRECISION_SHIM_ROLLOUT=follow"

KEYS = "dtype keys"
"""The subject of the decision on the keys that ``PRECISION_SHIM_ROLLOUT=follow`` writes."""


@dataclass(frozen=True)
class JobEngines:
    """The engines of a job.

    Attributes:
        trainer: the trained policy; ``None`` if its dtype is not known.
        others: the job's other engines: the rollout, the reference model and teachers.
    """

    trainer: Engine | None
    others: Sequence[Engine]


def follows(trainer: Engine, other: Engine, rollout: object) -> str:
    """The value that ``PRECISION_SHIM_ROLLOUT`` requires in an engine's key; empty if none."""
    return value_to_follow(trainer, other) if rollout == "follow" else ""


def report_engines(
    where: str, trainer: Engine, others: Sequence[Engine], write: Write | None = None
) -> None:
    """Compare each engine of a job with the trainer, and report whether they agree.

    Args:
        where: framework and version, such as ``"verl 0.9.1"``.
        trainer: the trained policy.
        others: the job's other engines.
        write: writes an engine's key under ``PRECISION_SHIM_ROLLOUT=follow``; ``None`` if the
            framework has already copied the config.

    Raises:
        UnsupportedPrecisionError: in strict mode, an engine disagrees with an fp16 trainer, or the
            rollout engine refuses the model in fp16.
    """
    settings = current_settings()
    decided, problems = _compare_all(where, trainer, others, settings, write=write)
    # A framework may check its config twice: do not report a decision of the first check again.
    said = {(one.subject, one.chosen) for one in decisions() if one.feature == FEATURE}
    for subject, chosen, because in decided:
        if (subject, chosen) not in said:
            decide(where.split(" ", 1)[0], subject, FEATURE, chosen, because)
    messages = [f"{problem.message}. {problem.remedy}" for problem in problems]
    if messages and settings.strict:
        raise UnsupportedPrecisionError("\n".join(messages))
    for message in messages:
        warn(message)


def problems_of(
    where: str, trainer: Engine, others: Sequence[Engine], settings: Settings, *, on: bool
) -> tuple[list[Problem], list[str]]:
    """Predict the warnings and decisions of ``report_engines``, for its arguments.

    If ``rollout-agreement`` is not in force (``on``), the shim changes no engine's dtype.
    """
    write = (lambda key, value: None) if on else None
    decided, problems = _compare_all(where, trainer, others, settings, write=write)
    notes = [f"{subject}: {FEATURE}: {chosen} ({because})" for subject, chosen, because in decided]
    return problems, notes


def _compare_all(
    where: str,
    trainer: Engine,
    others: Sequence[Engine],
    settings: Settings,
    *,
    write: Write | None,
) -> tuple[list[tuple[str, str, str]], list[Problem]]:
    """Compare the engines, write keys under ``follow``; return decisions and disagreements."""
    setting = settings["rollout"]
    changes, decided, problems = [], [], []
    for other in others:
        value = follows(trainer, other, setting)
        if value and write is not None:
            write(other.key, value)
            before = "not set" if other.value is None else other.value
            changes.append(f"{other.key}: {before} -> {value}")
            other = replace(other, computes=trainer.computes, because=FOLLOWED)  # noqa: PLW2901
        verdict = compare(trainer, other)
        decided.append((other.subject, verdict.chosen, verdict.because))
        if verdict.lost:
            texts = _message_of(where, trainer, verdict, setting)
            problems.append(Problem("rollout-dtype", other.subject, other.key, *texts))
    if changes:
        decided.insert(0, (KEYS, "; ".join(changes), FOLLOWED))
    return decided, problems


def _message_of(where: str, trainer: Engine, verdict: Verdict, rollout: object) -> tuple[str, str]:
    """The two parts of the message about a disagreement: the difference and the remedy."""
    other = verdict.engine
    message = (
        f"{where}: the {trainer.subject} computes in {trainer.computes} ({trainer.key}), the "
        f"{other.subject} in {other.computes} ({verdict.because})"
    )
    if not verdict.remedy:
        remedy = f"Train in bf16 ({trainer.key}), and let the {other.subject} compute in bf16."
    elif rollout == "follow" or not other.follows:
        remedy = f"Write {verdict.remedy}."
    else:
        remedy = f"Write {verdict.remedy}, or set {FOLLOWED}."
    return message, remedy
