"""Check an adapter's seams against the frameworks' source, and plan which symbols to patch.

Checking patches nothing, imports no framework and keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial

from ..process.framework import Adapter
from ..reporting.record import SeamStatus
from ._seam import Seam, name_of
from ._source import KINDS, Symbol, drop_trees, look

Group = tuple[str, str, str]
"""Framework, feature and name of a group of seams, of which the seam engine patches all or none."""

Proved = Callable[[str, str], "str | None"]
"""Returns what a record has for a fact, such as ``fact_of`` a seam, on a module's present source.

``None`` if it lacks the fact; else the answer of the seam's ``native``, and ``""`` without one.
"""

_UNREAD = Symbol("")


def nothing_proved(module: str, fact: str) -> None:
    """The ``Proved`` of an empty record: all source is parsed."""


@dataclass
class Row:
    """One seam of an adapter, and the seam's state, which the seam engine updates.

    Attributes:
        state: one of ``STATES``; ``pending`` means that the seam is still to be patched.
        reason: why the seam has this state; may be empty.
        causes: of a refused seam, the problems that ``reason`` lists.
        symbol: the symbol's description from its source; empty before the check, and if a record
            proves that the source meets the seam's requirements.
    """

    group: Group
    seam: Seam
    state: str = "pending"
    reason: str = ""
    causes: tuple[str, ...] = ()
    symbol: Symbol = _UNREAD

    def status(self, adapter: Adapter) -> SeamStatus:
        """Return the seam and its state in the form that ``status()`` shows."""
        seam = self.seam
        return SeamStatus(
            seam.target,
            seam.feature,
            self.state,
            self.reason,
            causes=self.causes,
            path=adapter.paths.get(seam.group, seam.group),
            refusal=seam.refusal,
            why=seam.why,
            upstream=seam.upstream,
            delete_when=seam.delete_when,
            group=seam.group,
        )


@dataclass(frozen=True)
class SeamPlan:
    """The actions that the seam engine would take for an adapter.

    ``rows`` are the seams of the installed version; ``refused`` has each refused group's reasons.
    """

    adapter: Adapter
    rows: tuple[Row, ...]
    refused: Mapping[Group, tuple[str, ...]] = field(default_factory=dict)

    def predicted(self) -> tuple[SeamStatus, ...]:
        """Return the predicted states of the seams; ``install()`` would patch ``pending`` seams."""
        return tuple(
            replace(row, state="refused", reason=row.seam.refusal).status(self.adapter)
            if row.state == "pending" and row.seam.refusal
            else row.status(self.adapter)
            for row in self.rows
        )


def list_unchecked(
    adapter: Adapter, features: Iterable[str], proved: Proved = nothing_proved
) -> tuple[Row, ...]:
    """Return the installed version's seams; reads only sources in ``only_if`` and ``unless``."""
    on, there = frozenset(features), cache(partial(_meets, proved))
    return tuple(
        Row(
            (adapter.framework, seam.feature, seam.group),
            seam,
            "pending" if seam.feature in on else "off",
        )
        for seam in adapter.seams
        if all(map(there, seam.only_if)) and not any(map(there, seam.unless))
    )


def _meets(proved: Proved, condition: str) -> bool:
    module = condition.partition(":")[0]
    if proved(module, condition) is not None:
        return True
    return proved(module, f"not {condition}") is None and is_there(condition)


def is_there(condition: str) -> bool:
    """Whether the source meets a condition of a seam's ``only_if`` or ``unless``."""
    target, _, name = condition.partition(" mentions ")
    symbol = look(target)
    if ":" not in target:
        return symbol.module_found
    return symbol.found and (not name or name in symbol.names)


def check(
    adapter: Adapter,
    features: Iterable[str],
    settings: object,
    had: Callable[[str], str] = lambda target: "",
    proved: Proved = nothing_proved,
) -> SeamPlan:
    """Decide from source which of an adapter's seams to patch.

    Args:
        adapter: the adapter.
        features: names of the features in force; seams of other features are ``off``.
        settings: passed to ``Seam.native``; no other code reads the settings.
        had: maps the target of an optional or conditional seam that does not exist in the source to
            a version that has the target (``"verl 0.9.1"``), or to ``""``.
        proved: what a record knows of the source; such source is not parsed.
    """
    rows = list_unchecked(adapter, features, proved)
    rows += tuple(_find_moved(adapter, features, rows, had, proved))
    problems: dict[Group, list[str]] = {}
    for row in rows:
        problem = _judge(row, settings, proved) if row.state == "pending" else ""
        if problem:
            problems.setdefault(row.group, []).append(problem)
    _refuse_halves(rows, problems, had)
    refused = {group: tuple(texts) for group, texts in problems.items()}
    for row in rows:
        missing_half = row.state == "absent" and row.reason in refused.get(row.group, ())
        if (row.state == "pending" and row.group in refused) or missing_half:
            refuse(row, refused[row.group])
    drop_trees()
    return SeamPlan(adapter, rows, refused)


def _find_moved(
    adapter: Adapter,
    features: Iterable[str],
    rows: Iterable[Row],
    had: Callable[[str], str],
    proved: Proved,
) -> Iterator[Row]:
    """Yield a ``Row`` for each seam with an unmet condition whose symbol no other seam finds.

    Conditions select a symbol's place in each version. If no seam finds the symbol, its group
    must be refused, not patched without the symbol.
    """
    on = frozenset(features)
    listed = {id(row.seam) for row in rows}
    placed = {(row.group, row.seam.wrapper, _last(row.seam)) for row in rows}
    for seam in adapter.seams:
        group = adapter.framework, seam.feature, seam.group
        if id(seam) in listed or seam.feature not in on or seam.wrapper is None or seam.refusal:
            continue
        elsewhere = (group, seam.wrapper, _last(seam)) in placed
        if not elsewhere and had(seam.target) and not _meets(proved, seam.target):
            yield Row(group, seam)


def _last(seam: Seam) -> str:
    return seam.attribute.rpartition(".")[2]


def _refuse_halves(
    rows: Iterable[Row], problems: dict[Group, list[str]], had: Callable[[str], str]
) -> None:
    """Add a problem for each group of seams that lost a module upstream but has other symbols.

    No problem is added if no version had the optional module, or if upstream removed all of the
    group's symbols.
    """
    stays = {row.group for row in rows if row.state == "pending" and not row.seam.refusal}
    for row in rows:
        seam = row.seam
        if row.state != "absent" or seam.refusal or seam.wrapper is None:
            continue
        version = "" if row.symbol.module_found else had(seam.target)
        if version:
            row.reason = f"{row.reason}, and {version} had {seam.target}"
            if row.group in stays:
                problems.setdefault(row.group, []).append(row.reason)


def _judge(row: Row, settings: object, proved: Proved) -> str:
    """Set a seam's state from source; return the reason to refuse the seam's group, or ``""``."""
    seam = row.seam
    answer = proved(seam.module, fact_of(seam))
    if answer is not None:
        _settle(row, answer)
        return ""
    symbol = row.symbol = look(seam.target)
    if not symbol.module_found and seam.optional:
        row.state, row.reason = "absent", symbol.problem
        return ""
    problem = symbol.problem or missing(seam, symbol)
    if problem and (seam.refusal or seam.wrapper is None):  # it patches nothing
        row.state, row.reason = "absent", problem
        return ""
    if problem:
        return problem
    try:
        native = seam.native(symbol, settings) if seam.native is not None else None
    except Exception as error:  # a broken adapter must not break the framework's import
        return f"{seam.target}: {name_of(seam.native)} failed: {error!r}"
    _settle(row, native)
    return ""


def _settle(row: Row, native: str | None) -> None:
    if native:
        row.state, row.reason = "native", native
    elif row.seam.wrapper is None:  # only other versions of the framework have the feature
        row.state = "absent"
    else:
        row.reason = row.seam.refusal


def fact_of(seam: Seam) -> str:
    """The fact that a seam's symbol is found, and that its source meets the requirements."""
    fits = [kind for kind in KINDS if seam.fits(kind)]
    native = f" {name_of(seam.native)}" if seam.native else ""
    return f"{seam.target} {seam.parameters} {sorted(seam.relies_on)} {fits}{native}"


def missing(seam: Seam, symbol: Symbol) -> str:
    """Return a message if a symbol's source does not meet the seam's requirements, else ``""``."""
    if not seam.fits(symbol.kind):
        kind = symbol.kind or "plain function"
        return f"{seam.target} is a {kind}, and {seam.name} is written for what is none"
    lacking = [parameter for parameter in seam.parameters if parameter not in symbol.parameters]
    if lacking:
        return f"{seam.target} has no parameter {', '.join(map(repr, lacking))}"
    lacking = [name for name in seam.relies_on if name not in symbol.names]
    if lacking:
        return f"{seam.target}: its source no longer mentions {', '.join(map(repr, lacking))}"
    return ""


def refuse(row: Row, problems: tuple[str, ...]) -> None:
    """Refuse a seam because of the problems that name it, or else of the first of its group."""
    named = tuple(text for text in problems if row.seam.target in text)
    row.state, row.causes = "refused", named or problems[:1]
    row.reason = "; ".join(named) or "refused whole, because: " + problems[0]
