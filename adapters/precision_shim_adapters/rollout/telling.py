"""Copy the trainer's dtype to a job's other engines on request, and report different dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from precision_shim.adapting import current_settings, decide, warn
from precision_shim.errors import UnsupportedPrecisionError
from precision_shim.planning.record import Problem
from precision_shim.precision.agreement import Engine, Verdict, compare, value_to_follow
from precision_shim.process.settings import Settings
from precision_shim.reporting.journal import decisions

FEATURE = "rollout-agreement"

Write = Callable[[str, str], object]
"""A function that sets a key of the job's config to a value such as ``"float16"``."""

FOLLOWED = "PRECISION_SHIM_ROLLOUT=follow"

KEYS = "dtype keys"
"""The subject of the decision on the keys that ``PRECISION_SHIM_ROLLOUT=follow`` writes."""


@dataclass(frozen=True)
class Sides:
    """The engines of a job.

    Attributes:
        trainer: the trained policy; ``None`` if its dtype is not known.
        others: the job's other engines: the rollout, the reference model and teachers.
        model_type: the model's type in its HF config, if vLLM loads the model; empty if unknown.
    """

    trainer: Engine | None
    others: Sequence[Engine]
    model_type: str = ""


def follows(trainer: Engine, other: Engine, model_type: str, rollout: object) -> str:
    """The value that ``PRECISION_SHIM_ROLLOUT`` requires in an engine's key; empty if none.

    Args:
        trainer: the trained policy.
        other: another engine of the job.
        model_type: the model's type in its HF config; empty if unknown.
        rollout: the value of ``PRECISION_SHIM_ROLLOUT``.
    """
    return value_to_follow(trainer, other, model_type) if rollout == "follow" else ""


def settle(
    where: str,
    trainer: Engine,
    others: Sequence[Engine],
    write: Write | None = None,
    model_type: str = "",
) -> None:
    """Compare each engine of a job with the trainer, and report whether they agree.

    Args:
        where: framework and version, such as ``"verl 0.9.1"``.
        trainer: the trained policy.
        others: the job's other engines.
        write: the function that writes an engine's key under ``PRECISION_SHIM_ROLLOUT=follow``;
            ``None`` if the framework has already copied the config.
        model_type: the model's type in its HF config; empty if unknown.

    Raises:
        UnsupportedPrecisionError: in strict mode, an engine disagrees with an fp16 trainer, or the
            rollout engine refuses the model in fp16.
    """
    settings = current_settings()
    rollout = settings["rollout"]
    verdicts, written = _compare(trainer, others, model_type, rollout if write else "tell")
    for engine, value in written:
        if write is not None:
            write(engine.key, value)
    # A framework may check its config twice: do not report a decision of the first check again.
    said = {(one.subject, one.chosen) for one in decisions() if one.feature == FEATURE}
    for subject, chosen, because in _decisions(verdicts, written):
        if (subject, chosen) not in said:
            decide(where.split(" ", 1)[0], subject, FEATURE, chosen, because)
    lost = [
        ". ".join(_message_of(where, trainer, verdict, rollout))
        for verdict in verdicts
        if verdict.lost
    ]
    if lost and settings.strict:
        raise UnsupportedPrecisionError("\n".join(lost))
    for message in lost:
        warn(message)


def problems_of(
    where: str,
    trainer: Engine,
    others: Sequence[Engine],
    settings: Settings,
    *,
    on: bool,
    model_type: str = "",
) -> tuple[list[Problem], list[str]]:
    """Predict for ``precision-shim plan`` the warnings and the decisions of ``settle``.

    Args:
        where: framework and version.
        trainer: the trained policy.
        others: the job's other engines.
        settings: the shim's settings for the job.
        on: whether ``rollout-agreement`` is in force; if not, the shim changes no engine's dtype.
        model_type: the model's type in its HF config; empty if unknown.
    """
    rollout = settings["rollout"]
    verdicts, written = _compare(trainer, others, model_type, rollout if on else "tell")
    problems = [
        Problem(
            "rollout-dtype",
            verdict.engine.subject,
            verdict.engine.key,
            *_message_of(where, trainer, verdict, rollout),
        )
        for verdict in verdicts
        if verdict.lost
    ]
    decided = _decisions(verdicts, written)
    notes = [f"{subject}: {FEATURE}: {chosen} ({because})" for subject, chosen, because in decided]
    return problems, notes


def _compare(
    trainer: Engine, others: Sequence[Engine], model_type: str, rollout: object
) -> tuple[list[Verdict], list[tuple[Engine, str]]]:
    """Compare the trainer with each engine; return also the engines to write, and the values."""
    verdicts, written = [], []
    for other in others:
        value = follows(trainer, other, model_type, rollout)
        if value:
            written.append((other, value))
            other = replace(other, computes=trainer.computes, because=FOLLOWED)  # noqa: PLW2901
        verdicts.append(compare(trainer, other, model_type))
    return verdicts, written


def _decisions(
    verdicts: Sequence[Verdict], written: Sequence[tuple[Engine, str]]
) -> list[tuple[str, str, str]]:
    """Subject, choice and reason of each decision; the first one is on the keys in ``written``."""
    found = [(verdict.engine.subject, verdict.chosen, verdict.because) for verdict in verdicts]
    changes = "; ".join(
        f"{engine.key}: {'not set' if engine.value is None else engine.value} -> {value}"
        for engine, value in written
    )
    return [(KEYS, changes, FOLLOWED), *found] if written else found


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
