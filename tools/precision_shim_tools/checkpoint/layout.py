"""Dataclasses for one model's checkpoint, and for the predicted result of a resume."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .tensors import Tensor
from .units import Unit

COMPONENTS = ("params", "master", "exp_avg", "exp_avg_sq", "other")
"""The components of a checkpoint's tensors, with the same names as in the audit."""

MOMENTS = ("exp_avg", "exp_avg_sq")

FLOATS = ("fp32", "bf16", "fp16", "float64")
"""The dtypes whose values are stored without a scale."""

REMAINDERS = "int16 remainders"
NUMBERS = "int16 remainders, stored as fp32 numbers"
UNKNOWN = "the file cannot tell"


@dataclass(frozen=True)
class Scaler:
    """The loss scaler's record in a checkpoint.

    Attributes:
        state: ``"of another save"`` if the files beside the record are from another save.
        where: the file, and the record's key in the file.
        text: the scaler's values, or the error in the record.
        saved: the validated record, if the shim wrote the record.
    """

    state: Literal["whole", "damaged", "none", "of another save"]
    where: str = ""
    text: str = ""
    saved: Any = None


@dataclass
class CheckpointPart:
    """One model of a checkpoint, with its optimizer.

    Attributes:
        framework: the framework that wrote the checkpoint; empty if no directory's name shows it.
        subject: name of the model, such as ``"actor"``; empty if no directory's name shows it.
        path: the model's directory.
        units: the directories with the files that contain the optimizer states.
        kind: kind of these files, such as ``"dcp"``; see ``Unit``.
        beside: the directories with files of other kinds, each with its kind.
        held: the model's tensors, by component.
        facts: what else predicts the resume, such as ``sharding`` and the dtype of ``params``.
        groups: for each optimizer of Megatron's, the settings of its parameter groups.
        scalers: the loss scaler records that the framework itself saved, not yet validated.
        masters: ``"fp32"``, ``REMAINDERS``, ``NUMBERS``, ``UNKNOWN`` or ``"none"``.
        bf16_moments: for each moment, whether every sampled value is a bf16 number.
        scaler: the loss scaler's record.
        read: the directories that were read, with the kind of their files; and single files.
        unknown: what no rule of the doctor covers: true for a state, false for a file.
        notes: further lines for the report.
    """

    framework: str
    subject: str
    path: Path
    units: tuple[Unit, ...]
    kind: str
    beside: tuple[tuple[Path, str], ...] = ()
    held: dict[str, list[Tensor]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    scalers: list[dict[str, Any]] = field(default_factory=list)
    masters: str = "none"
    bf16_moments: dict[str, bool] = field(default_factory=dict)
    scaler: Scaler = Scaler("none")
    read: dict[Path, str] = field(default_factory=dict)
    unknown: dict[str, bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, component: str, tensor: Tensor) -> None:
        """Add a tensor to a component."""
        self.held.setdefault(component, []).append(tensor)

    def dtypes(self, component: str) -> dict[str, int]:
        """Return the dtypes of a component, each with its number of elements."""
        counts: dict[str, int] = {}
        for tensor in self.held.get(component, ()):
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.elements
        return counts

    def bytes(self, component: str) -> int:
        """Return the size of a component, in bytes."""
        return sum(tensor.bytes for tensor in self.held.get(component, ()))


@dataclass(frozen=True)
class Outcome:
    """The predicted result of resuming one model.

    Attributes:
        verdict: ``"exact"``: nothing changes. ``"refused"``: the shim raises an error before
            training goes on. ``"misread"``: the framework loads wrong values without an error.
            ``"fails"``: the framework raises an error. ``"starts anew"``: the loss scale or the
            optimizer states are reset. ``"not here"``: this environment cannot resume the model.
            ``"not known"``: the checkpoint has states or files in ``CheckpointPart.unknown``.
        because: one sentence on the reason for ``verdict``.
        how: what makes the resume exact, if it is no setting of the shim's.
    """

    verdict: Literal["exact", "refused", "misread", "fails", "starts anew", "not here", "not known"]
    because: str
    how: str = ""

    @property
    def exact(self) -> bool:
        """Whether the resumed training equals a training without interruption."""
        return self.verdict == "exact"


def halves(part: CheckpointPart) -> Outcome | None:
    """Return how a resume ends without optimizer states or weights; ``None`` if both exist.

    An optimizer that has taken no step has no states, and is resumed with none.
    """
    states = any(part.held.get(component) for component in ("master", *MOMENTS))
    if not states and not all(unit.unstepped for unit in part.units):
        return Outcome("starts anew", "it has no optimizer states: the optimizer begins anew")
    if not part.held.get("params"):
        why = f"their files are missing, or {part.path.name} is not all of the checkpoint"
        return Outcome("fails", f"it has no weights: {why}")
    return None
