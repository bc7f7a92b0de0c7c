"""Compare the audits of many ranks: which ranks differ, and which are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .record import OF_MODEL, SOME, Audit, AuditPart, Finding

T = TypeVar("T")

_PASSING = ("grad_copies", "other")
"""Components whose dtypes may differ between ranks: they exist only in a step, or count steps."""


def signature(parts: Sequence[AuditPart], found: Iterable[Finding]) -> dict[str, Any]:
    """Return what should be equal on all ranks that own parameters (dtypes, scaler, problems)."""
    codes: dict[str, set[str]] = {part.name: set() for part in parts}
    for finding in found:
        codes.setdefault(finding.part or "all", set()).add(finding.code)
    said: dict[str, Any] = {f"{name}: problems": sorted(some) for name, some in codes.items()}
    for part in parts:
        said[f"{part.name}: scaler"] = part.scaler
        waits = any(component.state == "later" for component in part.components.values())
        for name, component in part.components.items():
            untold = waits and not component.dtypes
            if name not in _PASSING and (part.owned or name in OF_MODEL) and not untold:
                said[f"{part.name}: {name}"] = list(component.dtypes)
    return said


def unlike(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each key whose values differ in two results of ``signature``, with both values."""
    return {
        key: (value, other[key])
        for key, value in first.items()
        if key in other and other[key] != value
    }


def shown(value: Any) -> str:
    """Return a value from ``signature`` as text."""
    if isinstance(value, list):
        return "+".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


@dataclass(frozen=True)
class Comparison:
    """The comparison of all ranks' audits of one optimizer.

    Attributes:
        whose: framework and subject.
        part: names of the audit's parts, such as ``"dense+experts"``.
        audits: the audit of each rank that has one, by rank.
        differ: by rank that differs: each differing key's value on most ranks, and on that rank.
        missing: ranks without an audit.
    """

    whose: str
    part: str
    world_size: int
    audits: Mapping[int, Audit]
    differ: Mapping[int, Mapping[str, tuple[Any, Any]]]
    missing: tuple[int, ...]

    @property
    def alike(self) -> list[int]:
        """Ranks whose audits agree with the majority's."""
        return [rank for rank in self.audits if rank not in self.differ]

    @property
    def problems(self) -> dict[str, list[int]]:
        """Map each problem's text to the ranks that have the problem."""
        return grouped(
            (f"{problem.code}: {problem.message}", rank)
            for rank, audit in self.audits.items()
            for problem in audit.problems
        )

    @property
    def before_step(self) -> list[int]:
        """Ranks whose audit was made before the first step."""
        return [rank for rank, audit in self.audits.items() if audit.before_step]

    @property
    def without_some(self) -> list[int]:
        """Ranks whose audit, made after the first step, lacks some parameters' states."""
        return [
            rank for rank, audit in self.audits.items() if not (audit.complete or audit.before_step)
        ]

    @property
    def ok(self) -> bool:
        """Whether all ranks have an audit, agree, and have no problem."""
        return not (self.differ or self.missing or self.problems)

    def lines(self) -> list[str]:
        """Return the comparison as lines of text."""
        lines = [f"{self.whose}, {self.part}: {len(self.audits)} of {self.world_size} ranks"]
        alike = self.alike
        example = max((self.audits[rank] for rank in alike), key=lambda audit: audit.complete)
        lines.append(f"  {numbers(alike)}: {example.brief()}")
        texts = (
            ("; ".join(map(_difference, what.items())), rank) for rank, what in self.differ.items()
        )
        lines += [f"  differs, {numbers(ranks)}: {text}" for text, ranks in grouped(texts).items()]
        lines += [
            f"  {text}: {numbers(ranks)}"
            for text, ranks in (
                ("missing", self.missing),
                ("from before the first step", self.before_step),
                (SOME, self.without_some),
            )
            if ranks
        ]
        lines += [f"  problem, {numbers(some)}: {text}" for text, some in self.problems.items()]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison in a form for JSON."""
        return {
            "model": self.whose,
            "parts": self.part,
            "ok": self.ok,
            "world_size": self.world_size,
            "alike": self.alike,
            "differ": {
                rank: {
                    key: {"found": there, "elsewhere": here} for key, (here, there) in what.items()
                }
                for rank, what in self.differ.items()
            },
            "missing": list(self.missing),
            "problems": self.problems,
            "before_step": self.before_step,
            "without_some": self.without_some,
        }


def _difference(item: tuple[str, tuple[Any, Any]]) -> str:
    key, (elsewhere, there) = item
    return f"{key} is {shown(there)}, elsewhere {shown(elsewhere)}"


def grouped(pairs: Iterable[tuple[T, int]]) -> dict[T, list[int]]:
    """Map the first of each pair to the ranks that it is paired with."""
    found: dict[T, list[int]] = {}
    for what, rank in pairs:
        found.setdefault(what, []).append(rank)
    return found


def compare(audits: Iterable[tuple[str, Audit]]) -> list[Comparison]:
    """Group numbered (``files.number``) audits by model and optimizer, and compare each group."""
    groups: dict[tuple[str, str], dict[int, Audit]] = {}
    worlds: dict[str, int] = {}
    present: dict[str, set[int]] = {}
    for number, audit in sorted(audits, key=lambda pair: pair[1].rank):
        whose = audit.whose
        part = "+".join(part.name for part in audit.parts)
        part += f", optimizer {number}" if number else ""
        groups.setdefault((whose, part), {})[audit.rank] = audit
        worlds[whose] = max(worlds.get(whose, 0), audit.world_size)
        present.setdefault(whose, set()).add(audit.rank)
    return [
        Comparison(
            whose,
            part,
            worlds[whose],
            found,
            _differing(found),
            # A pipeline stage may have no layers for one of the model's optimizers: a rank is
            # missing only if it has no audit of any optimizer.
            tuple(sorted(set(range(worlds[whose])) - present[whose])),
        )
        for (whose, part), found in sorted(groups.items())
    ]


def _differing(found: Mapping[int, Audit]) -> dict[int, dict[str, tuple[Any, Any]]]:
    said = {
        rank: {
            # An audit with another world size comes from an earlier job in the same directory.
            "ranks of the job": audit.world_size,
            **signature(audit.parts, audit.problems),
        }
        for rank, audit in found.items()
    }
    # Compare with the rank whose values most ranks share; in a tie, with the lowest rank.
    votes = Counter((key, shown(value)) for each in said.values() for key, value in each.items())
    most = max(said.values(), key=lambda each: sum(votes[k, shown(v)] for k, v in each.items()))
    return {rank: what for rank, each in said.items() if (what := unlike(most, each))}


def numbers(ranks: Sequence[int]) -> str:
    """Return rank numbers as text: ``"rank 7"``, ``"ranks 0-6, 9"``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    return ("rank " if len(ranks) == 1 else "ranks ") + (", ".join(texts) or "none")
