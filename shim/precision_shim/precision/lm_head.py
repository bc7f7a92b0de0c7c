"""Decide whether all engines of an RL job can compute their LM head in fp32.

The head's matrix product rounds every logit to the model's dtype. With a head in fp32 in only one
engine, the probabilities differ (https://github.com/NVIDIA-NeMo/RL/pull/3936).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .agreement import FEATURE
from .findings import Decision, Findings, Problem

SETTING = "PRECISION_SHIM_HEAD=fp32"
SUBJECT = "LM head"
HEAD_MARK = "precision_shim_computes"
"""Attribute that the shim adds to a changed LM head: canonical name of the head's compute dtype."""


@dataclass(frozen=True)
class Head:
    """The LM head of one engine of a job, as the job's config describes it.

    Attributes:
        subject: ``"actor"``, ``"policy"``, ``"ref"`` or ``"rollout"``.
        key: the config key that makes the engine compute its LM head in fp32.
        in_fp32: whether the config already makes the engine compute its LM head in fp32.
        refusal: why the engine cannot compute its LM head in fp32; empty if it can.
        remedy: what the user can do about the refusal.
        value: the key's value for fp32.
        known: whether the engine that the job will use is installed on this machine.
    """

    subject: str
    key: str = ""
    in_fp32: bool = False
    refusal: str = ""
    remedy: str = ""
    value: str | bool = "float32"
    known: bool = True

    @property
    def idle(self) -> bool:
        """Whether the config's key for fp32 is set and has no effect."""
        return self.in_fp32 and bool(self.refusal) and self.known


def judge_heads(
    framework: str,
    where: str,
    heads: Sequence[Head],
    *,
    asked: bool,
    may_write: bool,
    here: bool = True,
) -> tuple[Findings, dict[str, str | bool]]:
    """Decide whether all LM heads of a job can be in fp32; if not, the shim changes no head.

    Args:
        framework: the framework's name.
        where: framework and version, such as ``"verl 0.9.1"``.
        heads: the LM heads of the job's engines.
        asked: whether the user asks for fp32. If not, a job with fp32 in only some engines, or
            with a key for fp32 that has no effect, gets a decision that reports it.
        may_write: whether the engines' config keys can still be set.
        here: whether the job runs on this machine. If not, an engine that is not installed here
            is no problem.

    Returns:
        The findings, and the config keys to write with their values.
    """
    if not asked or not heads:
        decided = tuple(Decision(framework, SUBJECT, FEATURE, *one) for one in _one_sided(heads))
        return Findings(decided), {}
    stay = [head for head in heads if head.refusal or not (head.in_fp32 or may_write)]
    findings = Findings((Decision(framework, SUBJECT, FEATURE, *_choice(heads, stay)),))
    sure = [head for head in stay if here or head.known]
    if sure:
        problem = Problem("lm-head", SUBJECT, sure[0].key, *_message_of(where, heads, sure))
        findings += Findings(problems=(problem,))
    return findings, {} if stay else {head.key: head.value for head in heads if not head.in_fp32}


def _one_sided(heads: Sequence[Head]) -> Iterator[tuple[str, str]]:
    wide = {head.subject: head for head in heads if head.in_fp32 and not head.idle}
    others = {head.subject: head for head in heads if head.subject not in wide}
    if wide and others:
        keys = ", ".join(head.key for head in wide.values())
        doubts = [head for head in (*wide.values(), *others.values()) if head.refusal]
        because = _reasons(doubts) or f"{SETTING} takes effect in all engines or in none"
        chosen = f"fp32 in {' and '.join(wide)}, the model's dtype in {' and '.join(others)}"
        yield chosen, f"{keys}; {because}"
    elif idle := [head for head in heads if head.idle]:
        yield f"the model's dtype in {' and '.join(others)}", _reasons(idle)


def _choice(heads: Sequence[Head], stay: Sequence[Head]) -> tuple[str, str]:
    if stay:
        return "each engine's own dtype", f"{SETTING} is refused: {_reasons(stay)}"
    keys = ", ".join(dict.fromkeys(head.key for head in heads if head.key))
    return "fp32 in trainer and rollout", f"{SETTING}; {keys}"


def _message_of(where: str, heads: Sequence[Head], stay: Sequence[Head]) -> tuple[str, str]:
    """The two parts of the message about the refusal of ``stay``: the reason and the remedy."""
    remedies = {
        head.remedy or ("" if head.refusal else f"Write {head.key}={head.value}") for head in stay
    }
    ways = ". ".join(sorted(remedies - {""}))
    message = (
        f"{where}: {SETTING} is refused, because it takes effect in all engines or in none: "
        f"{_reasons(stay)}. The shim changes no LM head"
    )
    theirs = ", ".join(
        dict.fromkeys(head.key for head in heads if head.in_fp32 and head.key and not head.idle)
    )
    if theirs:
        message += f", but {theirs} in the config takes effect"
    unset = f"{ways}. Or unset" if ways else "Unset"
    return message, f"{unset} PRECISION_SHIM_HEAD."


def _reasons(stay: Sequence[Head]) -> str:
    return "; ".join(
        f"{head.subject}: "
        + (head.refusal or f"{head.key} is not set, and the config is copied already")
        for head in stay
    )
