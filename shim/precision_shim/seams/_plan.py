"""The check: from an adapter's records and the frameworks' source to what would be done.

It patches nothing, imports no framework and keeps nothing. The engine acts on a plan; the doctor
shows one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .._status import SeamStatus
from ._seam import Adapter, Seam, name_of
from ._source import Symbol, look

Group = tuple[str, str, str]
"""Framework, feature, group: what is patched whole or not at all."""


@dataclass
class Row:
    """One seam of an adapter, and what is known about it; the engine carries it on.

    Attributes:
        group: what it is patched or refused with.
        seam: the record.
        state: one of ``STATES``; ``pending``: to be patched.
        reason: why, where there is something to say.
        symbol: what the source says; ``None`` before the check.
    """

    group: Group
    seam: Seam
    state: str = "pending"
    reason: str = ""
    symbol: Symbol | None = None

    def status(self) -> SeamStatus:
        """The row as ``status()`` shows it."""
        return SeamStatus(self.seam.target, self.seam.feature, self.state, self.reason)


@dataclass(frozen=True)
class Plan:
    """What would be done for an adapter.

    Attributes:
        rows: one per seam, in the order of the table.
        refused: the groups that are refused whole, with the reasons.
    """

    rows: tuple[Row, ...]
    refused: Mapping[Group, tuple[str, ...]] = field(default_factory=dict)

    def foretold(self) -> tuple[SeamStatus, ...]:
        """The states as they will be, for a look ahead."""
        return tuple(
            SeamStatus(row.seam.target, row.seam.feature, "refused", row.seam.refusal)
            if row.state == "pending" and row.seam.refusal
            else row.status()
            for row in self.rows
        )


def unchecked(adapter: Adapter, features: Iterable[str]) -> tuple[Row, ...]:
    """The rows of an adapter before any look: to be patched, or of a feature that is off."""
    on = frozenset(features)
    return tuple(
        Row((adapter.framework, one.feature, one.group), one, "pending" if one.feature in on else "off")
        for one in adapter.seams
    )


def check(adapter: Adapter, features: Iterable[str], settings: object) -> Plan:
    """Settle what source can settle of an adapter's seams.

    Args:
        adapter: whose seams.
        features: names of the features in force; seams of others are ``off``.
        settings: handed to native probes; nothing else looks inside.
    """
    rows: list[Row] = []
    problems: dict[Group, list[str]] = {}
    for row in unchecked(adapter, features):
        if row.state == "pending":
            row, problem = _judged(row, settings)
            if problem:
                problems.setdefault(row.group, []).append(problem)
        rows.append(row)
    refused = {group: tuple(found) for group, found in problems.items()}
    for row in rows:
        if row.state == "pending" and row.group in refused:
            row.state, row.reason = "refused", refusal(row.seam, refused[row.group])
    return Plan(tuple(rows), refused)


def _judged(row: Row, settings: object) -> tuple[Row, str]:
    """The row with what its symbol's source says, and why its group must be refused."""
    seam, symbol = row.seam, look(row.seam.target)

    def now(state: str, reason: str = "", problem: str = "") -> tuple[Row, str]:
        return Row(row.group, seam, state, reason, symbol), problem

    native, broken = None, ""
    if seam.native is not None and symbol.found:
        try:
            native = seam.native(symbol, settings)
        except Exception as error:  # a broken adapter must not break the framework's import
            broken = f"{seam.target}: {name_of(seam.native)} failed: {error!r}"
    if seam.wrapper is None:  # a record of what the framework does itself
        if broken:
            return now("pending", "", broken)
        return now("native", native) if native else now("absent", symbol.problem)
    if not symbol.module_found and seam.optional:
        return now("absent", symbol.problem)
    problem = symbol.problem or missing(seam, symbol)
    if problem and seam.refusal:  # nothing is patched there, so nothing need hold
        return now("absent", problem)
    if problem or broken:
        return now("pending", "", problem or broken)
    return now("native", native) if native else now("pending", seam.refusal)


def missing(seam: Seam, symbol: Symbol) -> str:
    """What a seam needs of its symbol and the source does not have, in words, or ``""``."""
    lacking = [one for one in seam.parameters if one not in symbol.parameters]
    if lacking:
        return f"{seam.target} has no parameter {', '.join(map(repr, lacking))}"
    lacking = [one for one in seam.relies_on if one not in symbol.names]
    if lacking:
        return f"{seam.target}: its source no longer mentions {', '.join(map(repr, lacking))}"
    return ""


def refusal(seam: Seam, problems: Iterable[str]) -> str:
    """Why a seam of a refused group is: its own problems, or the first that there was."""
    problems = tuple(problems)
    own = [text for text in problems if seam.target in text]
    return "; ".join(own) or "refused whole, because: " + problems[0]
