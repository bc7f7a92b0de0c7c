"""The answer of every rule of precision: choices, problems and notes.

A worker acts on ``Findings`` with ``adapting.report``; the command ``plan`` lists the same object.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import PrecisionShimError


@dataclass(frozen=True)
class Decision:
    """A choice of the shim, and its reason.

    Attributes:
        subject: the part of the job that the choice concerns, such as ``"actor"`` or ``"rollout"``.
        chosen, because: the choice and the reason, in words.
    """

    framework: str
    subject: str
    feature: str
    chosen: str
    because: str

    def __str__(self) -> str:
        return f"{self.framework} {self.subject}: {self.feature}: {self.chosen} ({self.because})"


@dataclass(frozen=True)
class Problem:
    """An illegal value in the job's config.

    Attributes:
        code: kind of problem, such as ``"dtype"``; docs/plan.md lists all codes.
        subject: name of the model with the problem; empty for the whole job.
        key: the config key.
        message: the value in the config, and the allowed values.
        remedy: the config line or value to write instead.
    """

    code: str
    subject: str
    key: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}"

    @classmethod
    def of(cls, error: PrecisionShimError, subject: str, key: str, code: str = "dtype") -> Problem:
        """Make a ``Problem`` of a worker's error; the error's last sentence is the remedy."""
        message, _, remedy = str(error).rpartition(". ")
        return cls(code, subject, key, message or remedy, remedy if message else "")


@dataclass(frozen=True)
class Findings:
    """What a rule chose, what is wrong, and what it only reports, doubts included."""

    decisions: tuple[Decision, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: Findings) -> Findings:
        return Findings(
            self.decisions + other.decisions,
            self.problems + other.problems,
            self.notes + other.notes,
        )

    @classmethod
    def all(cls, several: Iterable[Findings]) -> Findings:
        """Join the findings of several rules, in their order."""
        return sum(several, cls())
