"""The result of an audit as plain data, with conversions to JSON and to text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

COMPONENTS = (
    "params",
    "frozen",
    "grad_buckets",
    "grad_copies",
    "master",
    "exp_avg",
    "exp_avg_sq",
    "other",
)
"""Kinds of tensors; storage that several kinds share counts for the first of these kinds."""

OF_MODEL = ("params", "frozen", "grad_buckets")
"""Components of the model, whose bytes are divided by the number of all trained parameters."""

MOMENTS = ("exp_avg", "exp_avg_sq")

PER_PARAMETER = ("params", "grad_buckets", "grad_copies", "master", "exp_avg", "exp_avg_sq")
"""Components whose size is proportional to the number of trainable parameters."""

SOME = "without the states of parameters that had no gradient"
"""Text for an audit that was made after the first step and lacks some states."""

_TITLES = ("component", "dtypes", "B/param", "bytes", "allocated", "held", "on", "state")
_NUMBERS = ("B/param", "bytes", "allocated")
_INDENT = "  "


@dataclass(frozen=True)
class AuditComponent:
    """All tensors of one kind, such as ``exp_avg``, of one optimizer on this rank.

    Attributes:
        dtypes: sorted names (canonical, or torch's); in state ``"later"`` those that are declared.
        bytes: size of the elements, without padding.
        allocated: size of the storages, padding included; each storage is counted once.
        bytes_per_parameter: ``bytes`` divided by the part's ``parameters`` for a component in
            ``OF_MODEL``, and by ``owned`` for other components; 0.0 if the divisor is 0.
        sharded: whether each data-parallel rank stores only a shard of the component.
        device: device types, such as ``"cuda"`` or ``"cpu+cuda"``; empty without tensors.
        state: ``"live"`` (all tensors exist), ``"none"`` (there are no tensors) or ``"later"`` (a
            step with a gradient will create the missing tensors).
    """

    dtypes: tuple[str, ...] = ()
    bytes: int = 0
    allocated: int = 0
    bytes_per_parameter: float = 0.0
    sharded: bool = False
    device: str = ""
    state: str = "none"


@dataclass(frozen=True)
class AuditPart:
    """One optimizer and the parameters that it trains.

    Attributes:
        name: ``"model"``, ``"dense"`` or ``"experts"``; a second of this name is ``"model 2"``.
        optimizer: name of the optimizer's class.
        data_parallel_size: number of data-parallel ranks that share this part of the model.
        parameters: number of the model's parameters that the optimizer trains.
        owned: number of trained parameters whose states this rank stores.
        scaler: class name of the loss scaler, or ``None``.
        components: an ``AuditComponent`` for each name in ``COMPONENTS``.
        updates: updates lost to rounding, see ``UpdateWatch.figures``; ``None`` if not measured.
        shards: number of different shards in the data-parallel group; 0: all differ.
        routers: dtype names in which the routers of a mixture of experts compute; empty if unknown.
    """

    name: str
    optimizer: str
    data_parallel_size: int
    parameters: int
    owned: int
    scaler: str | None
    components: Mapping[str, AuditComponent]
    updates: Mapping[str, Any] | None = None
    shards: int = 0
    routers: str = ""

    def brief(self) -> str:
        """Return the dtypes in use, in one line."""
        held = {name: "+".join(component.dtypes) for name, component in self.components.items()}
        words = [f"{held['params'] or 'no'} parameters"]
        words += [
            f"{held[name]} {word}"
            for name, word in (("grad_buckets", "buckets"), ("master", "masters"))
            if held[name]
        ]
        if held["exp_avg"] or held["exp_avg_sq"]:
            words.append(f"{held['exp_avg'] or 'no'}/{held['exp_avg_sq'] or 'no'} moments")
        if self.routers:
            words.append(f"{self.routers} routers")
        if self.scaler:
            words.append(self.scaler)
        return ", ".join(words)


@dataclass(frozen=True)
class Finding:
    """A problem or a note.

    Attributes:
        code: kind of finding, such as ``"main-grads-dtype"``; docs/audit.md lists all codes.
        part: name of the ``AuditPart``, or ``None`` if the finding concerns all parts of the audit.
        component: name of the component, or ``None``.
        expected: the expected value, such as ``"fp32"``.
        found: the value found.
        message: a sentence with ``expected``, ``found`` and a remedy.
    """

    code: str
    part: str | None
    component: str | None
    expected: str
    found: str
    message: str


@dataclass(frozen=True)
class Audit:
    """The result of ``precision_shim.audit`` on this rank; ``str()`` formats it as a table.

    Attributes:
        framework: the framework's name; if user code calls ``audit``, the optimizer's package.
        subject: name of the model, such as ``"actor"``; empty if user code calls ``audit``.
        rank: rank of this process.
        world_size: number of ranks of the job.
        parts: an ``AuditPart`` for each optimizer.
        totals: sums of ``bytes``, ``allocated`` and ``host`` (allocated in host memory); and
            ``cuda_allocated``, the bytes of all this process's tensors on its GPU.
        problems: contradictions with the optimizer's config, with ``expected`` or with other ranks.
        notes: findings that contradict no config, such as a second moment that cannot decay.
        ranks: how many were ``compared``, and which ``differ`` from the first; or ``None``.
    """

    framework: str
    subject: str
    rank: int
    world_size: int
    parts: tuple[AuditPart, ...]
    totals: Mapping[str, int]
    problems: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()
    ranks: Mapping[str, Any] | None = None

    @property
    def whose(self) -> str:
        """Framework and subject."""
        return f"{self.framework} {self.subject}".strip()

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def complete(self) -> bool:
        """Whether all tensors exist, so that no component is in the state ``"later"``."""
        return not any(
            component.state == "later"
            for part in self.parts
            for component in part.components.values()
        )

    @property
    def before_step(self) -> bool:
        """Whether no step was taken yet: states are missing, and no moment exists.

        If ``complete`` and ``before_step`` are both false, some parameters had no gradient in the
        steps so far, and have no states.
        """
        moments = (part.components[name] for part in self.parts for name in MOMENTS)
        return not self.complete and not any(moment.allocated for moment in moments)

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as dicts, lists, strings and numbers, as read from its JSON file."""
        plain = json.loads(json.dumps(asdict(self)))
        return {**plain, "ok": self.ok, "complete": self.complete}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Audit:
        """Make an audit from the result of ``to_dict``, or from its JSON.

        Raises:
            KeyError, TypeError, AttributeError: the ``values`` describe no audit.
        """
        given = {name: value for name, value in values.items() if name not in ("ok", "complete")}
        for name in ("problems", "notes"):
            given[name] = tuple(Finding(**finding) for finding in values[name])
        given["parts"] = tuple(map(_part_of, values["parts"]))
        return cls(**given)

    @property
    def headline(self) -> str:
        """Framework, subject, rank and number of problems, in one line."""
        count = len(self.problems)
        verdict = "ok" if self.ok else f"{count} problem{'s' if count > 1 else ''}"
        if not self.complete:
            verdict += ", before the first step" if self.before_step else f", {SOME}"
        return f"{self.whose}, rank {self.rank} of {self.world_size}: {verdict}"

    def brief(self) -> str:
        """Return the dtypes in use and the codes of problems and notes, in one line."""
        parts = [f"{part.name}: {part.brief()}" for part in self.parts]
        if [part.name for part in self.parts] == ["model"]:
            parts = [self.parts[0].brief()]
        codes = ", ".join(dict.fromkeys(finding.code for finding in self.problems))
        noted = ", ".join(dict.fromkeys(finding.code for finding in self.notes))
        verdict = f"problems: {codes}" if codes else "no problems"
        return "; ".join((*parts, verdict, *([f"notes: {noted}"] if noted else ())))

    def __str__(self) -> str:
        lines = [f"audit of {self.headline}"]
        for part in self.parts:
            lines += ["", *_part(part)]
        total = ", ".join(f"{name} {number:,}" for name, number in self.totals.items())
        lines += ["", f"total: {total}"]
        if self.ranks is not None:
            unlike = ", ".join(map(str, self.ranks["differ"])) or "none"
            lines.append(f"ranks compared: {self.ranks['compared']}, that differ: {unlike}")
        for title, findings in (("problems", self.problems), ("notes", self.notes)):
            if findings:
                lines += ["", title]
            lines += [f"{_INDENT}{finding.code}: {finding.message}" for finding in findings]
        return "\n".join(lines)


def _part_of(values: Mapping[str, Any]) -> AuditPart:
    components = {name: values["components"][name] for name in COMPONENTS}
    made = {
        name: AuditComponent(**{**fields, "dtypes": tuple(fields["dtypes"])})
        for name, fields in components.items()
    }
    return AuditPart(**{**values, "components": made})


def _part(part: AuditPart) -> list[str]:
    shown = {name: each for name, each in part.components.items() if each.state != "none"}
    rows: list[Sequence[str]] = [_TITLES]
    rows += [
        (
            name,
            "+".join(component.dtypes) or "?",
            f"{component.bytes_per_parameter:.2f}" if name in PER_PARAMETER else "",
            f"{component.bytes:,}",
            f"{component.allocated:,}",
            f"1/{part.shards or part.data_parallel_size}" if component.sharded else "whole",
            component.device,
            component.state,
        )
        for name, component in shown.items()
    ]
    per_parameter = sum(c.bytes_per_parameter for name, c in shown.items() if name in PER_PARAMETER)
    size = sum(component.bytes for component in shown.values())
    allocated = sum(component.allocated for component in shown.values())
    rows.append(("together", "", f"{per_parameter:.2f}", f"{size:,}", f"{allocated:,}", "", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = (
        "  ".join(
            text.rjust(width) if title in _NUMBERS else text.ljust(width)
            for title, text, width in zip(_TITLES, row, widths, strict=True)
        )
        for row in rows
    )
    lines = [
        f"{part.name}: {part.optimizer}, {part.parameters:,} parameters, {part.owned:,} owned, "
        f"data parallel {part.data_parallel_size}, scaler {part.scaler or 'none'}"
        + (f", routers {part.routers}" if part.routers else ""),
        *(f"{_INDENT}{line}".rstrip() for line in table),
    ]
    if part.updates:
        lines += [f"{_INDENT}{updates_line(part.updates)}"]
    return lines


def updates_line(figures: Mapping[str, Any]) -> str:
    """Return an optimizer's figures as a line of text."""
    titles = {"weights": "stored weights", "exp_avg_sq": "second moment"}
    shares = ", ".join(
        f"{title} {figures[name]:.1%} ({figures['dtypes'][name]})"
        for name, title in titles.items()
        if figures[name] is not None
    )
    return f"updates lost to rounding at step {figures['step']}: {shares}"
