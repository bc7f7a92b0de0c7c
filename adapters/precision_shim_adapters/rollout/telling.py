"""At a job's start: give other engines the trainer's dtype if asked, and report differences."""

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
    """The value that another engine's key gets from ``PRECISION_SHIM_ROLLOUT``; empty for none.

    Args:
        trainer: the trained policy.
        other: another engine of its job.
        model_type: the model's type in its HF config; empty if it is not known.
        rollout: the value of the setting.
    """
    asked = rollout == "follow" and not other.written and other.key
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
    """Decide for each engine of a job whether it agrees with the trainer, and report it.

    Args:
        where: framework and version, such as ``"verl 0.9.1"``.
        trainer: the trained policy.
        others: the job's other engines.
        write: writes an engine's key under ``PRECISION_SHIM_ROLLOUT=follow``; ``None`` where the
            framework has copied the config already.
        model_type: the model's type in its HF config; empty if it is not known.

    Raises:
        UnsupportedPrecisionError: in strict mode, an fp16 trainer's engines disagree with it, or
            the rollout engine refuses the model in fp16.
    """
    settings = current_settings()
    framework, verdicts = where.split(" ", 1)[0], []
    for one in others:
        name = follows(trainer, one, model_type, settings["rollout"]) if write else ""
        if write is not None and name:
            write(one, name)
            one = replace(one, computes=trainer.computes, because=FOLLOWED)  # noqa: PLW2901
        verdicts.append(compare(trainer, one, model_type))
    said = {(one.subject, one.chosen) for one in decisions() if one.feature == FEATURE}
    for verdict in verdicts:
        # A framework may check its config twice; the second check finds what the first one wrote.
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
    """The message about a disagreement, in two parts: what differs and why, and the remedy.

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
    if rollout == "follow":
        return f"Write {verdict.remedy}."
    first = "leave the key out and " if verdict.engine.written else ""
    return f"Write {verdict.remedy}, or {first}set {FOLLOWED}."
