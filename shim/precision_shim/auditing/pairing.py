"""Group ``Sent`` and ``Held`` records by framework and job, and show their contradictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .contradictions import Contradiction, contradictions
from .halves import Half, Held, Sent, Weights
from .ranks import numbers


@dataclass(frozen=True)
class Pair:
    """The weights sent in one job, the engines' weights, and the contradictions between them.

    Attributes:
        whose: the framework.
        job: the job's name; empty if jobs cannot be distinguished.
        sent: the latest ``Sent`` record of each rank of the trainer.
        held: the ``Held`` record of each engine.
        found: the job's contradictions.
    """

    whose: str
    job: str
    sent: tuple[Sent, ...]
    held: tuple[Held, ...]
    found: tuple[Contradiction, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no contradiction."""
        return not self.found

    def lines(self) -> list[str]:
        """Return the records and contradictions as lines of text."""
        lines = [f"{self.whose}, trainer and rollout" + (f", job {self.job}" if self.job else "")]
        by_text: dict[str, list[int]] = {}
        for record in self.sent:
            by_text.setdefault(_sent_text(record), []).append(record.rank)
        lines += [f"  sent, {numbers(ranks)}: {text}" for text, ranks in by_text.items()]
        by_engine: dict[str, list[str]] = {}
        for engine in self.held:
            by_engine.setdefault(_held_text(engine), []).append(engine.name)
        lines += [f"  held, {', '.join(names)}: {text}" for text, names in by_engine.items()]
        if not self.held:
            reasons = {record.not_asked for record in self.sent} - {""}
            lines.append(f"  held: not known: {'; '.join(sorted(reasons)) or 'no engine told it'}")
        if not self.sent:
            lines.append("  sent: not known: no process of the trainer told it")
        for (code, message), who in self.problems().items():
            ranks = [rank for rank in who if isinstance(rank, int)]
            shown = [numbers(ranks)] if ranks else []
            shown += [name for name in who if isinstance(name, str)]
            lines.append(f"  contradiction, {', '.join(shown)}: {code}: {message}")
        return lines

    def problems(self) -> Mapping[tuple[str, str], list[int | str]]:
        """Map each contradiction (code and message) to the ranks and engines that have it."""
        by_text: dict[tuple[str, str], list[int | str]] = {}
        for contradiction in self.found:
            by_text.setdefault((contradiction.code, contradiction.message), []).append(
                contradiction.who
            )
        return {key: list(dict.fromkeys(who)) for key, who in by_text.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return a summary of records and contradictions in a form for JSON."""
        return {
            "framework": self.whose,
            "job": self.job,
            "ok": self.ok,
            "sent": _by_name((one.rank, one.subject, _sent_text(one)) for one in self.sent),
            "held": _by_name((one.name, one.subject, _held_text(one)) for one in self.held),
            "contradictions": [
                {"code": code, "message": message, "who": who}
                for (code, message), who in self.problems().items()
            ],
        }


def _by_name(records: Iterable[tuple[int | str, str, str]]) -> dict[int | str, str]:
    """Map each rank or engine to its record's text; a model's name distinguishes equal names."""
    every = list(records)
    times = Counter(name for name, _, _ in every)
    return {
        name if times[name] == 1 else f"{subject}, {name}": text for name, subject, text in every
    }


def pair(halves: Iterable[Half]) -> list[Pair]:
    """Group records by framework and job, and compare the records of each group."""
    groups: dict[tuple[str, str], list[Half]] = {}
    for record in halves:
        groups.setdefault((record.framework, record.job), []).append(record)
    found = []
    for (whose, job), several in sorted(groups.items()):
        sent = tuple(record for record in several if isinstance(record, Sent))
        held = tuple(record for record in several if isinstance(record, Held))
        sent = tuple(sorted(sent, key=lambda record: (record.subject, record.rank)))
        held = tuple(sorted(held, key=lambda record: (record.subject, record.name)))
        found.append(Pair(whose, job, sent, held, tuple(contradictions(sent, held))))
    return found


def _sent_text(one: Sent) -> str:
    asked = f"{one.asked} asked ({one.key})" if one.asked else "dtype asked not known"
    words = [f"{one.subject}, sync {one.sync}", asked]
    for group, weights in one.sent.items():
        then = f", then rounded to {one.then}" if one.then else ""
        words.append(f"{group} in {_dtypes(weights.dtypes)}{then}, {_shares(weights, one, group)}")
    if one.quantised:
        words.append(f"{len(one.quantised)} layers in 8 bits")
    if one.head:
        words.append(f"head computes in {one.head}")
    return "; ".join(words)


def _shares(weights: Weights, one: Sent, group: str) -> str:
    own = one.own.get(group)
    before = "not known" if own is None else _percent(own.exact)
    return f"exact in bf16: {_percent(weights.exact)}, of the trainer's own {before}"


def _percent(share: float | None) -> str:
    return "not known" if share is None else f"{100 * share:.0f} %"


def _dtypes(counts: Mapping[str, int]) -> str:
    return "+".join(sorted(counts)) or "no dtype"


def _held_text(one: Held) -> str:
    words = [f"{one.subject}, {one.engine}", f"computes in {one.computes or '?'}"]
    if one.quantization:
        words.append(f"quantisation {one.quantization}")
    if one.not_answered:
        if one.kv_cache:
            words.append(f"KV cache ? ({one.kv_cache})")
        words.append(f"weights not known: {one.not_answered}")
        return "; ".join(words)
    kinds: dict[str, list[str]] = {}
    for kind, counts in sorted(one.kinds.items()):
        kinds.setdefault(_dtypes(counts), []).append(kind)
    words += [f"{'/'.join(names)} in {dtypes}" for dtypes, names in kinds.items()]
    if one.quantised or one.quantization:
        words.append(f"{_layers(one.quantised)} quantised, {_layers(one.plain)} not")
    cache = f"{'+'.join(one.kv_held) or '?'} ({one.kv_cache or 'auto'})"
    words.append(f"KV cache {cache}")
    if one.head:
        words.append(f"head computes in {one.head}")
    if one.weights is not None:
        of = f" of {one.sample}" if one.sample else ""
        words.append(f"sync {one.sync}: exact in bf16: {_percent(one.weights.exact)}{of}")
    return "; ".join(words)


def _layers(names: Sequence[str]) -> str:
    return f"{len(names)} layer{'' if len(names) == 1 else 's'}"
