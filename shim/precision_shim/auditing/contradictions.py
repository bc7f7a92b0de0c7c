"""Compare the weights that a trainer sent with the rollout engines' weights, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..precision.agreement import CANONICAL
from .halves import BASE, ROLLOUT, Held, Sent, Weights
from .layers import MATRICES, holds_a_word_of, is_named, joined, kind_of

OWN_AT_MOST, SENT_AT_LEAST = 0.98, 0.999
"""The audit reports a rounding to bf16 if bf16 represents less than ``OWN_AT_MOST`` of the weights
exactly before sending, and more than ``SENT_AT_LEAST`` of the weights afterwards."""

LEAST_SAMPLE = 256
"""Minimum number of sampled elements with which the audit can detect a rounding to bf16."""


@dataclass(frozen=True)
class Contradiction:
    """A difference between the configured dtype, the sent weights and an engine's weights.

    Attributes:
        code: kind of contradiction, such as ``"bf16-wire"``; docs/audit.md lists all codes.
        who: rank of the trainer's process or name of the engine with the contradiction.
        message: text with the expectation, the finding and a remedy.
    """

    code: str
    who: int | str
    message: str


def contradictions(sent: Sequence[Sent], held: Sequence[Held]) -> Iterator[Contradiction]:
    """Yield the contradictions in one job of one framework.

    Args:
        sent: for each rank of the trainer, a record of the weights that the rank sent.
        held: a record for each engine, including engines of models other than the trained policy.
    """
    rollouts = [engine for engine in held if engine.subject == ROLLOUT]
    for engine in rollouts:
        for ask in _once(sent):
            yield from _engine_dtype(ask, engine)
            yield from _head_dtype(ask, engine)
    for record in sent:
        if not rollouts and CANONICAL.get(record.asked) == "bf16" and not record.quantised:
            yield from _rollout_dtype(record, record.rank)
        yield from _of_wire(record, rollouts)
        for engine in rollouts:
            yield from _received(record, engine)
            yield from _sent_in_8_bits(record, engine)
    for engine in held:  # including engines of models other than the trained policy
        yield from _held_dtype(engine)
        yield from _left_out(engine)


def _once(sent: Sequence[Sent]) -> Iterable[Sent]:
    return {
        (record.asked, record.key, record.head, record.computes): record for record in sent
    }.values()


def computes(sent: Sent, rollouts: Sequence[Held]) -> set[str]:
    """Return the rollout engines' compute dtypes; if no engine reported, the configured dtype."""
    if rollouts:
        return {engine.computes for engine in rollouts}
    return {CANONICAL[sent.asked]} if sent.asked in CANONICAL else set()


def _engine_dtype(ask: Sent, engine: Held) -> Iterator[Contradiction]:
    due = CANONICAL.get(ask.asked)  # "auto" and NeMo-RL's "fp8" are not canonical dtype names
    if due is not None and engine.computes and engine.computes != due:
        yield Contradiction(
            "engine-dtype",
            _who(engine),
            f"{ask.key}={ask.asked}, but the engine computes in {engine.computes}: something goes "
            f"over the key on the way to {engine.engine}. Look for a second dtype among the "
            "engine's own arguments.",
        )
    elif engine.computes == "bf16" and not engine.quantization:
        yield from _rollout_dtype(ask, _who(engine))


def _rollout_dtype(ask: Sent, who: int | str) -> Iterator[Contradiction]:
    """Yield a contradiction if the trainer of a bf16 rollout is known to compute in fp16."""
    if ask.computes == "fp16":
        key = f" ({ask.key}=float16)" if ask.key else ""
        yield Contradiction(
            "rollout-dtype",
            who,
            f"the {ask.subject} computes in fp16, and the rollout in bf16, so the two round "
            "differently, and the mismatch that fp16 removes stays. Let the rollout compute in "
            f"fp16{key}, or train in bf16.",
        )


def _head_dtype(one: Sent, engine: Held) -> Iterator[Contradiction]:
    """Yield a contradiction if only the trainer or only the engine runs its LM head in fp32."""
    if one.head and engine.head and engine.head != one.head:
        yield Contradiction(
            "head-dtype",
            _who(engine),
            f"the {one.subject} computes its LM head in {one.head}, and the engine in "
            f"{engine.head}, so the two round logits differently. Unset PRECISION_SHIM_HEAD, or "
            f"let {engine.engine} compute its head in {one.head}.",
        )
    if one.computes and not one.head and engine.head == "fp32" and engine.computes != "fp32":
        yield Contradiction(
            "head-dtype",
            _who(engine),
            f"the engine computes its LM head in fp32, and the {one.subject} in {one.computes}, so "
            f"the two round logits differently. Let {engine.engine} compute its head in the "
            "model's dtype, or set PRECISION_SHIM_HEAD=fp32.",
        )


def _of_wire(one: Sent, rollouts: Sequence[Held]) -> Iterator[Contradiction]:
    """Yield a contradiction if sent weights are rounded to bf16 but no engine computes in bf16."""
    engines = computes(one, rollouts)
    if not engines or not engines <= {"fp16", "fp32"}:
        return
    into, who = "+".join(sorted(engines)), one.rank
    for group, weights in one.sent.items():
        own = one.own.get(group)
        if own is None:
            continue
        if _mostly_bf16(weights, one.then) and not _mostly_bf16(own):
            by = " by the framework's sender" if one.then else ""
            yield Contradiction(
                "weights-dtype",
                who,
                f"{group} go out in bf16{by}, the engine computes in {into}, and the trainer keeps "
                f"them in {'+'.join(sorted(own.dtypes))}: each sync rounds them to bf16. Let the "
                f"framework send {into}, or let the rollout compute in bf16.",
            )
        elif not one.quantised and _rounded(own, weights):
            yield Contradiction(
                "bf16-wire",
                who,
                f"bf16 represents all {group} that were sent exactly, but not the trainer's own, "
                f"and the engine computes in {into}: something rounds them to bf16 before they "
                "are sent, which no dtype shows. Look for a cast in the framework's weight sync.",
            )


def _mostly_bf16(weights: Weights, then: str = "") -> bool:
    if then:
        return then == "bf16"
    total = sum(weights.dtypes.values())
    return 2 * weights.dtypes.get("bf16", 0) > total


def _rounded(before: Weights, after: Weights) -> bool:
    """Whether bf16 represents nearly all weights exactly after a transfer, but not before it."""
    if before.exact is None or after.exact is None:
        return False
    if min(before.sampled, after.sampled) < LEAST_SAMPLE:
        return False
    return before.exact < OWN_AT_MOST and after.exact > SENT_AT_LEAST


def _received(one: Sent, engine: Held) -> Iterator[Contradiction]:
    """Yield a contradiction if a weight sync rounds weights to bf16 between sender and engine."""
    same = engine.sync == one.sync and engine.computes in ("fp16", "fp32")
    weights = one.sent.get(BASE)
    if not same or engine.quantization or weights is None or engine.weights is None:
        return
    if engine.sample:  # a few parameters may be exact in bf16 without any rounding
        return
    if one.then != "bf16" and not one.quantised and _rounded(weights, engine.weights):
        yield Contradiction(
            "bf16-wire",
            _who(engine),
            "bf16 represents all weights that the engine holds exactly, but not those that were "
            f"sent, and the engine computes in {engine.computes}: something rounds them to bf16 "
            "on the way, which no dtype shows. Look for a cast where the engine receives them.",
        )


def _held_dtype(engine: Held) -> Iterator[Contradiction]:
    """Yield a contradiction if an fp16 engine has bf16 weights, or vice versa."""
    if engine.quantization or engine.computes not in ("fp16", "bf16"):
        return
    other = {"fp16": "bf16", "bf16": "fp16"}[engine.computes]
    wrong = [kind for kind in MATRICES if engine.kinds.get(kind, {}).get(other)]
    if wrong:
        yield Contradiction(
            "held-dtype",
            _who(engine),
            f"the engine computes in {engine.computes} and holds weights in {other}: "
            f"{', '.join(wrong)}. Look for a weight sync that replaces tensors, or for a dtype of "
            "the model's own.",
        )


def _sent_in_8_bits(one: Sent, engine: Held) -> Iterator[Contradiction]:
    """Yield a contradiction for layers sent in 8 bits that the engine stores unquantised."""
    plain = {joined(name): name for name in engine.plain}
    quantised = {joined(name) for name in engine.quantised}
    names = {joined(name) for name in one.quantised}
    weights = [plain[name] for name in sorted(names - quantised) if name in plain]
    if weights:
        yield Contradiction(
            "layers-quantised",
            _who(engine),
            f"the engine holds {_count(weights)} without quantisation, and they were sent in 8 "
            f"bits: {_some(weights)}. Give trainer and engine one list of layers to leave out.",
        )


def _left_out(engine: Held) -> Iterator[Contradiction]:
    """Yield contradictions for 16-bit layers that are not named in an engine's ignore list."""
    if not engine.quantization or not engine.quantised or engine.ignored is None:
        return
    plain = [layer for layer in engine.plain if kind_of(layer) in ("attention", "mlp", "experts")]
    unnamed = [layer for layer in plain if not is_named(layer, engine.ignored)]
    by_word: dict[str, list[str]] = {}
    for layer in unnamed:
        word = holds_a_word_of(layer, engine.ignored)
        if word:
            by_word.setdefault(word, []).append(layer)
    for word, layers in by_word.items():
        yield Contradiction(
            "layers-quantised",
            _who(engine),
            f"the engine holds {_count(layers)} in 16 bits that {engine.quantization} was meant "
            f"for: {_some(layers)}. The list of layers to leave out has {word!r}, which is only a "
            "piece of their names. Write whole names there, or a regular expression.",
        )
    mixed = {_like(layer) for layer in engine.quantised}
    some = [layer for layer in unnamed if not holds_a_word_of(layer, engine.ignored)]
    odd = [layer for layer in some if _like(layer) in mixed]
    if odd:
        yield Contradiction(
            "layers-quantised",
            _who(engine),
            f"the engine holds {_count(odd)} in 16 bits, quantises others of their kind, and its "
            f"list of layers to leave out names none of them: {_some(odd)}. Compare the list with "
            "the engine's names.",
        )


def _like(layer: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in layer.split("."))


def _count(layers: Sequence[str]) -> str:
    return f"{len(layers)} layer{'s' if len(layers) > 1 else ''}"


def _some(layers: Sequence[str]) -> str:
    return ", ".join(layers[:3]) + (", ..." if len(layers) > 3 else "")


def _who(engine: Held) -> str:
    return engine.name if engine.subject == ROLLOUT else f"{engine.subject}, {engine.name}"
