"""What a checkpoint holds of one model, and what becomes of it. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .tensors import Tensor
from .units import Unit

PARAMS, MASTER, EXP_AVG, EXP_AVG_SQ, OTHER = "params", "master", "exp_avg", "exp_avg_sq", "other"
COMPONENTS = (PARAMS, MASTER, EXP_AVG, EXP_AVG_SQ, OTHER)
"""What a checkpoint's tensors are for, by the names that the audit has for them."""

WHOLE, REMAINDERS, NUMBERS, UNKNOWN, NONE = (
    "fp32",
    "int16 remainders",
    "int16 remainders, stored as fp32 numbers",
    "the file cannot tell",
    "none",
)
"""What a checkpoint has for the masters."""


@dataclass(frozen=True)
class Scaler:
    """The record of a loss scaler.

    Attributes:
        state: ``"whole"``, ``"damaged"``, ``"of another save"`` (than the files beside it) or
            ``"none"``.
        where: the file, and the key in it.
        text: its figures, or what is wrong with it.
        saved: the validated record, where it is the shim's.
    """

    state: str
    where: str = ""
    text: str = ""
    saved: Any = None


@dataclass
class Part:
    """One model of a checkpoint, with its optimizer.

    Attributes:
        framework: the framework whose directory it is; empty where that does not show.
        subject: which model: ``"actor"``; empty where there is only one.
        path: its directory.
        units: the directories of files in it.
        kind: what wrote the optimizer's states: one of ``units``' kinds.
        beside: directories of other kinds, and these: exports for inference, or the weights.
        weights: of these, the directories that were read for the parameters.
        held: its tensors, by component.
        facts: what the doctor's readers found beside: ``sharding``, ``params`` and ``bucket``
            (dtypes), ``adam_beta2``, and what a backend's reader has to say to its own foretelling.
        scalers: records of scalers that a backend's reader found, as they stand there.
        masters: what there is for the masters: see the constants above.
        moments: for each moment, the narrower dtypes that hold every value that was looked at.
        scaler: the loss scaler's record.
        notes: what else is worth a line.
    """

    framework: str
    subject: str
    path: Path
    units: tuple[Unit, ...]
    kind: str
    beside: tuple[tuple[Path, str], ...] = ()
    weights: list[Unit] = field(default_factory=list)
    held: dict[str, list[Tensor]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    scalers: list[dict[str, Any]] = field(default_factory=list)
    masters: str = NONE
    moments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scaler: Scaler = field(default_factory=lambda: Scaler("none"))
    notes: list[str] = field(default_factory=list)

    def add(self, component: str, tensor: Tensor) -> None:
        """Note a tensor."""
        self.held.setdefault(component, []).append(tensor)

    def dtypes(self, component: str) -> dict[str, int]:
        """The dtypes of a component, each with the number of its elements."""
        found: dict[str, int] = {}
        for one in self.held.get(component, ()):
            found[one.dtype] = found.get(one.dtype, 0) + one.elements
        return found

    def bytes(self, component: str) -> int:
        """What a component takes."""
        return sum(one.bytes for one in self.held.get(component, ()))

    @property
    def has_states(self) -> bool:
        """Whether an optimizer's states are there."""
        return any(self.held.get(one) for one in (MASTER, EXP_AVG, EXP_AVG_SQ))

    @property
    def params_dtype(self) -> str | None:
        """The one dtype of the parameters, as far as the file shows it."""
        floating = [one for one in self.dtypes(PARAMS) if one[:2] in ("fp", "bf")]
        known = self.facts.get("params")
        return known or (floating[0] if len(floating) == 1 else None)


EXACT, REFUSED, MISREAD, FAILS, FRESH, NOT_HERE = (
    "exact",
    "refused",
    "misread",
    "fails",
    "starts anew",
    "not here",
)


@dataclass(frozen=True)
class Outcome:
    """What a resume makes of a part.

    Attributes:
        verdict: ``"exact"``; ``"refused"`` by the shim, before training goes on; ``"misread"`` by
            the framework, without a word; ``"fails"`` with an error of the framework's own;
            ``"starts anew"``: the loss scale or the optimizer does, from its beginning;
            ``"not here"``: this environment cannot resume it at all.
        because: why, in one sentence.
    """

    verdict: str
    because: str

    @property
    def exact(self) -> bool:
        """Whether training goes on as if it had not been stopped."""
        return self.verdict == EXACT


def halves(part: Part) -> Outcome | None:
    """What a resume makes of a model that is there by half; ``None`` of one that is whole."""
    if not part.has_states:
        return Outcome(FRESH, "it has no optimizer states: the optimizer begins anew")
    if not part.held.get(PARAMS):
        why = f"their files are missing, or {part.path.name} is not all of the checkpoint"
        return Outcome(FAILS, f"it has no weights: {why}")
    return None
