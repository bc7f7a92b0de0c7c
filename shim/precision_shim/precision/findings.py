"""What a rule of precision answers with: the shim's choices, and problems of a job's config."""

from __future__ import annotations

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

    @classmethod
    def of(cls, error: PrecisionShimError, subject: str, key: str, code: str = "dtype") -> Problem:
        """Make a ``Problem`` of a worker's error; the error's last sentence is the remedy."""
        message, _, remedy = str(error).rpartition(". ")
        return cls(code, subject, key, message or remedy, remedy if message else "")
