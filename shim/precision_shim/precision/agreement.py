"""Decide by the dtypes' names whether two engines of an RL job compute in the same dtype.

An RL loss contains the ratio of the trainer's probabilities to another engine's, and engines that
round differently differ in every token. fp16 removes the difference only if both engines use it:
docs/both-sides.md, arXiv 2510.26788.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .findings import Decision, Findings, Problem
from .formats import UNKNOWN, Format, Forward, differences, forward_of

FEATURE = "rollout-agreement"
FOLLOWED = "PRECISION_SHIM_ROLLOUT=follow"
ROUTER = "router"
KEYS = "dtype keys"
"""The subject of the decision on the keys that ``PRECISION_SHIM_ROLLOUT=follow`` writes."""

ENGINE_NAMES: Mapping[str, str] = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Maps a dtype's canonical name to its name in vLLM, SGLang and the frameworks' parsers."""

AUTO, FP8 = "auto", "fp8"
"""``Engine.computes`` is ``AUTO`` for the checkpoint's dtype, and ``FP8`` for weights in fp8."""


@dataclass(frozen=True)
class Engine:
    """One engine of a job, as the job's config describes it.

    Attributes:
        subject: what users call it, such as ``"actor"``, ``"policy"``, ``"ref"`` or ``"rollout"``.
        computes: canonical name of the engine's compute dtype, or ``AUTO`` or ``FP8``.
        key: the config key that sets ``computes``; empty if no key does.
        value: the key's value; ``None`` if the key is not set.
        because: why the engine does not compute in the dtype that ``key`` sets; empty if it does.
        prefix: text before the key on the framework's command line, such as Hydra's "++".
        values: maps each allowed dtype's canonical name to the key's value for this dtype.
        follows: whether the engine is started from the config that the driver can still change.
        rounded: what it keeps in fewer bits, such as its KV cache, and the config key; or empty.
        refuses: the engine's reason not to run the model in fp16; empty if none was found.
        format: what its quantized layers compute in; ``None`` if the config shows none.
        quantizes: maps what a forward pass quantizes to the config key and value that give it.
    """

    subject: str
    computes: str
    key: str
    value: object = field(default=None, hash=False)
    because: str = ""
    prefix: str = ""
    values: Mapping[str, str] = field(default_factory=lambda: ENGINE_NAMES, hash=False)
    follows: bool = True
    rounded: tuple[str, str] = ("", "")
    refuses: str = ""
    format: Format | None = None
    quantizes: Mapping[Forward, tuple[str, str]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a trainer with another engine of its job.

    Attributes:
        lost: whether the user must change the config: the engine cannot run the model in fp16, or
            the trainer computes in fp16 and the engine in bf16.
        chosen: text on the dtypes of the engine and the trainer.
        because: text on the reason for ``chosen`` and ``lost``.
        remedy: the config line that gives the engine the trainer's dtype; empty if none can.
        apart: whether their configs quantize the layers differently.
    """

    lost: bool
    chosen: str
    because: str
    remedy: str = ""
    apart: bool = False


@dataclass(frozen=True)
class Wire:
    """A weight sync, as the job's config describes it.

    Attributes:
        subject: the engine that receives the weights, such as ``"rollout"``.
        computes: canonical name of the dtype that the engine computes in.
        sent: canonical name of the dtype in which the weights are sent.
        because: why the weights are sent in the dtype ``sent``.
        key: the config's key for the dtype of the sent weights.
        remedy: the remedy, as a sentence.
    """

    subject: str
    computes: str
    sent: str
    because: str
    key: str
    remedy: str


@dataclass(frozen=True)
class Gate:
    """The matrix product of an engine's routers, which choose the experts of each token.

    Attributes:
        subject: the engine.
        computes: canonical name of the product's dtype; empty if no source shows it.
        because: the config key with its value, or the source code that sets it.
    """

    subject: str
    computes: str
    because: str


def judge_gates(framework: str, gates: Sequence[Gate]) -> Findings:
    """Compare the routers of a trainer and its rollout; ``gates`` may be empty."""
    if not gates:
        return Findings()
    mine, theirs = gates
    names = [one.computes or UNKNOWN for one in gates]
    chosen, because = f"{names[1]} beside the {mine.subject}'s {names[0]}", ""
    if UNKNOWN in names:
        because = "; where the two differ, a token may go to other experts"
    elif names[0] == names[1]:
        chosen = f"{names[1]}, as the {mine.subject}"
    else:
        because = ": the two round differently, so a token may go to other experts"
    because = f"{mine.because}; {theirs.because}{because}"
    return Findings((Decision(framework, ROUTER, FEATURE, chosen, because),))


def compare(trainer: Engine, other: Engine) -> Verdict:
    """Compare a trainer (fp16, bf16, fp32) with another engine of its job."""
    found = _compare(trainer, other)
    what, key = other.rounded
    if what and found.chosen != other.computes:  # else the model is refused
        because = f"{key}: the engine rounds once more, so its probabilities differ"
        chosen = f"{_named(other)} with {what} beside the {trainer.subject}'s {trainer.computes}"
        found = replace(found, chosen=chosen, because=f"{found.because}; {because}")
    if trainer.format is None and other.format is None:
        return found
    return _with_formats(trainer, other, found)


def _named(engine: Engine) -> str:
    return "the checkpoint's dtype" if engine.computes == AUTO else engine.computes


def _with_formats(trainer: Engine, other: Engine, found: Verdict) -> Verdict:
    """Add to the verdict on two dtypes what their quantized layers compute in."""
    mine, theirs = trainer.format, other.format
    if mine is None or theirs is None:
        said = [
            f"the {one.subject} has {one.format}" if one.format else f"the {one.subject} has none"
            for one in (trainer, other)
        ]
        because = f"quantized layers: {', '.join(said)}: the two round differently"
        chosen = found.chosen
        if mine is not None or not (other.computes == FP8 or other.rounded[0]):
            names = [
                f"{_named(one)} with {one.format}" if one.format else _named(one)
                for one in (other, trainer)
            ]
            chosen = f"{names[0]} beside the {trainer.subject}'s {names[1]}"
        keys = "; ".join(one.key for one in (mine, theirs) if one is not None)
        reason = f"{found.because}; {keys}: {because}"
        return replace(found, chosen=chosen, because=reason, apart=True)
    differ, may = differences(mine, theirs, (trainer.subject, other.subject))
    keys = f"{found.because}; {mine.key}; {theirs.key}"
    if not differ and not may:
        because = f"{keys}: the kernels, and layers that each leaves out unasked, may still differ"
        return replace(found, chosen=f"{theirs}, as the {trainer.subject}", because=because)
    how = "differently" if differ else "perhaps differently"
    chosen = f"{_named(other)} beside the {trainer.subject}'s, quantized {how}"
    texts = "; ".join([*differ, *(f"may differ: {one}" for one in may)])
    return replace(found, chosen=chosen, because=f"{keys}: {texts}", apart=bool(differ))


def _compare(trainer: Engine, other: Engine) -> Verdict:
    whose, dtype = f"the {trainer.subject}'s {trainer.computes}", other.computes
    source = other.because or other.key
    value = other.values.get(trainer.computes, "")
    remedy = f"{other.prefix}{other.key}={value}" if other.key and value else ""
    if trainer.computes == "fp16" and other.refuses:
        remedy = ""
    if dtype == "fp16" and other.refuses:
        return Verdict(True, dtype, other.refuses, remedy)
    if dtype == trainer.computes:
        return Verdict(False, f"{dtype}, as the {trainer.subject}", source)
    # With an fp16 trainer, an fp32 engine has as small a mismatch as an fp16 engine.
    lost = trainer.computes == "fp16" and dtype == "bf16"
    if dtype == FP8 and trainer.format is not None:  # the formats are compared
        return Verdict(False, f"fp8 beside {whose}", source)
    if dtype == FP8:
        because = f"{source}: its weights are rounded to fp8, so its probabilities differ"
        return Verdict(False, f"fp8 beside {whose}", because)
    if dtype == AUTO:
        chosen = f"the checkpoint's dtype beside {whose}"
        reason = "which dtype that is, is not known here; the engine's own log names it"
        reason += f", and {remedy} sets it" if remedy else ""
    else:
        chosen, reason = f"{dtype} beside {whose}", _harm(other.subject, lost=lost)
    return Verdict(lost, chosen, f"{source}: {reason}", remedy)


def _harm(subject: str, *, lost: bool) -> str:
    kept = ", and the mismatch that fp16 removes stays" if lost else ""
    if subject == "rollout":
        return f"the two round differently{kept}"
    return "the two round differently, which adds to the KL term"


def _value_to_follow(trainer: Engine, other: Engine) -> str:
    """The value that gives another engine's key the trainer's dtype; empty if it is not written.

    An engine with fp8 weights keeps them, and none is made to run a model that it refuses.
    """
    dtype = trainer.computes
    if not other.key or not other.follows or other.computes in (dtype, FP8):
        return ""
    if dtype == "fp16" and other.refuses:
        return ""
    return other.values.get(dtype, "")


def judge_engines(
    framework: str,
    where: str,
    trainer: Engine,
    others: Sequence[Engine],
    *,
    follow: bool,
    may_write: bool,
) -> tuple[Findings, dict[str, str]]:
    """Compare the engines of a job with its trainer.

    Args:
        framework: the framework's name.
        where: framework and version, such as ``"verl 0.9.1"``.
        trainer: the trained policy.
        others: the job's other engines.
        follow: whether the user asks for the trainer's dtype in all engines.
        may_write: whether the config that the engines are started from can still change.

    Returns:
        The findings, and the config keys to write with their values.
    """
    found, writes, changes = Findings(), {}, []
    for other in others:
        value = _value_to_follow(trainer, other) if follow and may_write else ""
        if value:
            writes[other.key] = value
            before = "not set" if other.value is None else other.value
            changes.append(f"{other.key}: {before} -> {value}")
            other = replace(other, computes=trainer.computes, because=FOLLOWED)  # noqa: PLW2901
        key, value = other.quantizes.get(forward_of(trainer.format), ("", ""))
        if key and other.format is None and other.follows and follow and may_write:
            writes[key] = value
            changes.append(f"{key}: not set -> {value}")
            parts = trainer.format.parts if trainer.format else {}
            other = replace(other, format=Format(parts, (), FOLLOWED))  # noqa: PLW2901
        verdict = compare(trainer, other)
        made = Decision(framework, other.subject, FEATURE, verdict.chosen, verdict.because)
        texts = _message_of(where, trainer, other, verdict, follow=follow)
        problem = Problem("rollout-dtype", other.subject, other.key, *texts)
        lost = verdict.lost or (follow and verdict.apart)
        found += Findings((made,), (problem,) if lost else ())
    if changes:
        made = Decision(framework, KEYS, FEATURE, "; ".join(changes), FOLLOWED)
        found = Findings((made,)) + found
    return found, writes


def _message_of(
    where: str, trainer: Engine, other: Engine, verdict: Verdict, *, follow: bool
) -> tuple[str, str]:
    """The two parts of the message about a disagreement: the difference and the remedy."""
    message = (
        f"{where}: the {trainer.subject} computes in {trainer.computes} ({trainer.key}), the "
        f"{other.subject} in {other.computes} ({verdict.because})"
    )
    if verdict.apart and not verdict.lost:
        remedy = "Quantize the layers of both in one format, or of neither."
    elif not verdict.remedy:
        remedy = f"Train in bf16 ({trainer.key}), and let the {other.subject} compute in bf16."
    elif follow or not other.follows:
        remedy = f"Write {verdict.remedy}."
    else:
        remedy = f"Write {verdict.remedy}, or set {FOLLOWED}."
    return message, remedy


def judge_wires(framework: str, where: str, wires: Sequence[Wire]) -> Findings:
    """Find the weight syncs that round; it is a problem if the engine computes in fp16.

    For ``framework`` and ``where`` see ``judge_engines``.
    """
    found = Findings()
    for one in wires:
        if one.sent in ("fp32", one.computes):
            continue
        chosen = f"weights go out in {one.sent}, and the {one.subject} computes in {one.computes}"
        message = (
            f"{where}: the {one.subject} computes in {one.computes}, and its weights go out in "
            f"{one.sent} ({one.because}): each sync rounds every weight to {one.sent}"
        )
        made = Decision(framework, one.subject, FEATURE, chosen, one.because)
        problem = Problem("rollout-dtype", one.subject, one.key, message, one.remedy)
        found += Findings((made,), (problem,) if one.computes == "fp16" else ())
    return found
