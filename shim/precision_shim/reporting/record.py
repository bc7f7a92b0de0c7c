"""The record that ``status()`` returns, and its parts: the shim's patches and choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..precision.findings import Decision

if TYPE_CHECKING:
    from ..auditing.record import Audit

STATES = ("absent", "pending", "wrapped", "native", "refused", "off")
"""States of a seam and of a framework: ``absent`` (not installed), ``pending`` (the module is not
yet imported), ``wrapped`` (patched), ``native`` (the framework has the feature itself), ``refused``
(could not be patched) and ``off`` (not enabled by the settings)."""


@dataclass(frozen=True)
class SeamStatus:
    """State of one seam for one feature.

    Attributes:
        target: ``"module:attribute"``.
        state: one of ``STATES``.
        reason: why the seam has this state; may be empty.
        causes: of a refused seam, the problems that ``reason`` tells.
        path: what users call the part of the framework with the seam, such as ``"FSDP engine"``.
        refusal: why the feature is impossible in this part of the framework; may be empty.
        why, upstream, delete_when, group: see ``Seam``.
    """

    target: str
    feature: str
    state: str
    reason: str = ""
    causes: tuple[str, ...] = ()
    path: str = ""
    refusal: str = ""
    why: str = ""
    upstream: str = ""
    delete_when: str = ""
    group: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return target, feature, state and reason as a dict for JSON."""
        return {name: getattr(self, name) for name in ("target", "feature", "state", "reason")}


@dataclass(frozen=True)
class FrameworkStatus:
    """State of one framework.

    Attributes:
        version: the framework's version; ``None`` if the framework is not installed.
        state: one of ``STATES``.
        seams: the framework's seams; empty until the framework's adapter is loaded.
        reason: why ``state`` has its value; may be empty.
        tested: whether the version is a tested version; ``None`` while this is unknown.
    """

    version: str | None
    state: str
    seams: tuple[SeamStatus, ...] = ()
    reason: str = ""
    tested: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all but ``tested`` as a dict for JSON."""
        return {
            "version": self.version,
            "state": self.state,
            "reason": self.reason,
            "seams": [seam.to_dict() for seam in self.seams],
        }


@dataclass(frozen=True)
class Record:
    """A snapshot of the shim in this process, with the fields of ``Status``."""

    enabled: bool
    features: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    frameworks: Mapping[str, FrameworkStatus] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    audit: Sequence[Audit] = field(default_factory=list)
