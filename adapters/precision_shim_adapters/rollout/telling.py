"""Copy the trainer's dtype to a job's other engines on request, and report different dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from precision_shim.adapting import current_settings, decide, warn
from precision_shim.errors import UnsupportedPrecisionError
from precision_shim.precision.agreement import (
    FP8,
    Engine,
    Verdict,
    compare,
    refuses_fp16,
)
from precision_shim.reporting.journal import decisions

FEATURE = "rollout-agreement"

Write = Callable[[Engine, str], None]
"""A function that writes a value such as ``"float16"`` to an engine's key in the config."""

FOLLOWED = "PRECISION_SHIM_ROLLOUT=follow"


def follows(trainer: Engine, other: Engine, model_type: str, rollout: object) -> str:
    """The dtype name that ``PRECISION_SHIM_ROLLOUT`` requires in an engine's key; empty if none.

    Args:
        trainer: the trained policy.
        other: another engine of the job.
        model_type: the model's type in its HF config; empty if unknown.
        rollout: the value of ``PRECISION_SHIM_ROLLOUT``.
    """
    asked = rollout == "follow" and other.follows and not other.written and other.key
    if not asked or other.computes in (trainer.computes, FP8):
        return ""
    if refuses_fp16(trainer.computes, other.subject, model_type):
        return ""
    return other.values.get(trainer.computes, "")


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
    framework, verdicts = where.split(" ", 1)[0], []
    for other in others:
        name = follows(trainer, other, model_type, settings["rollout"]) if write else ""
        if write is not None and name:
            write(other, name)
            other = replace(other, computes=trainer.computes, because=FOLLOWED)  # noqa: PLW2901
        verdicts.append(compare(trainer, other, model_type))
    said = {
        (decision.subject, decision.chosen)
        for decision in decisions()
        if decision.feature == FEATURE
    }
    for verdict in verdicts:
        # A framework may check its config twice: do not report a decision of the first check again.
        if (verdict.engine.subject, verdict.chosen) not in said:
            decide(framework, verdict.engine.subject, FEATURE, verdict.chosen, verdict.because)
    lost = [
        ". ".join(message_of(where, trainer, verdict, settings["rollout"]))
        for verdict in verdicts
        if verdict.lost
    ]
    if lost and settings.strict:
        raise UnsupportedPrecisionError("\n".join(lost))
    for message in lost:
        warn(message)


def message_of(where: str, trainer: Engine, verdict: Verdict, rollout: object) -> tuple[str, str]:
    """The two parts of the message about a disagreement: the difference and the remedy.

    Args:
        where: framework and version.
        trainer: the trained policy.
        verdict: the result of comparing the trainer with another engine.
        rollout: the value of ``PRECISION_SHIM_ROLLOUT``.
    """
    other = verdict.engine
    message = (
        f"{where}: the {trainer.subject} computes in {trainer.computes} ({trainer.key}), the "
        f"{other.subject} in {other.computes} ({verdict.because})"
    )
    return message, _way_out(trainer, verdict, rollout)


def _way_out(trainer: Engine, verdict: Verdict, rollout: object) -> str:
    if not verdict.remedy:
        subject = verdict.engine.subject
        return f"Train in bf16 ({trainer.key}), and let the {subject} compute in bf16."
    if rollout == "follow" or not verdict.engine.follows:
        return f"Write {verdict.remedy}."
    first = "leave the key out and " if verdict.engine.written else ""
    return f"Write {verdict.remedy}, or {first}set {FOLLOWED}."
