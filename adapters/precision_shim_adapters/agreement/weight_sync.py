"""Report the dtype in which weights are sent to an engine, and whether sending rounds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from precision_shim.adapting import current_settings, decide, warn
from precision_shim.errors import UnsupportedPrecisionError
from precision_shim.precision.agreement import rounds
from precision_shim.precision.findings import Problem

from .report import FEATURE


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

    @property
    def rounds(self) -> bool:
        """Whether the sync rounds the weights."""
        return rounds(self.sent, self.computes)

    @property
    def lost(self) -> bool:
        """Whether the sync rounds the weights of an fp16 engine, and so loses fp16's precision."""
        return self.rounds and self.computes == "fp16"

    @property
    def chosen(self) -> str:
        """The dtypes of the sent weights and of the engine, in words."""
        return f"weights go out in {self.sent}, and the {self.subject} computes in {self.computes}"


def tell_of_wires(where: str, wires: Sequence[Wire], *, may_raise: bool = True) -> None:
    """Report which weight syncs of a job round the weights; ``where`` is framework and version.

    ``may_raise`` is false in a worker, because the other ranks would wait for the rank that raised.

    Raises:
        UnsupportedPrecisionError: in strict mode, a sync rounds the weights of an fp16 engine.
    """
    framework = where.split(" ", 1)[0]
    for wire in wires:
        if wire.rounds:
            decide(framework, wire.subject, FEATURE, wire.chosen, wire.because)
    lost = [f"{_message(where, wire)}. {wire.remedy}" for wire in wires if wire.lost]
    if lost and may_raise and current_settings().strict:
        raise UnsupportedPrecisionError("\n".join(lost))
    for message in lost:
        warn(message)


def wire_problems(where: str, wires: Sequence[Wire]) -> tuple[list[Problem], list[str]]:
    """Return ``tell_of_wires``'s warnings as problems, and a note on each sync that rounds."""
    problems = [
        Problem("rollout-dtype", wire.subject, wire.key, _message(where, wire), wire.remedy)
        for wire in wires
        if wire.lost
    ]
    rounding = [wire for wire in wires if wire.rounds]
    return problems, [
        f"{wire.subject}: {FEATURE}: {wire.chosen} ({wire.because})" for wire in rounding
    ]


def _message(where: str, one: Wire) -> str:
    return (
        f"{where}: the {one.subject} computes in {one.computes}, and its weights go out in "
        f"{one.sent} ({one.because}): each sync rounds every weight to {one.sent}"
    )
