"""What the shim did in this process: the record that ``status()`` returns and people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

STATES = ("absent", "pending", "wrapped", "native", "refused", "off")
"""States of a seam and of a framework: not installed; waits for the module's import; patched;
the framework does it itself; could not be patched; not asked for."""


@dataclass(frozen=True)
class Decision:
    """What the shim chose in this process, from what, and why.

    Attributes:
        framework: the framework's name.
        subject: what it was decided for, such as ``"actor"`` or ``"critic"``.
        feature: the feature that decided.
        chosen: what was chosen, in words.
        because: the reason, in words.
    """

    framework: str
    subject: str
    feature: str
    chosen: str
    because: str

    def __str__(self) -> str:
        return f"{self.framework} {self.subject}: {self.feature}: {self.chosen} ({self.because})"


@dataclass(frozen=True)
class SeamStatus:
    """State of one seam for one feature."""

    target: str
    feature: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class FrameworkStatus:
    """State of one framework: its version (``None`` when not installed) and its seams."""

    version: str | None
    state: str
    seams: tuple[SeamStatus, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Status:
    """A snapshot of the shim in this process; ``str()`` is a table of at most 80 columns.

    Attributes:
        enabled: whether the shim is installed in this process.
        features: names of the features in force.
        settings: every setting's value by its lower-case name, and ``strict``.
        frameworks: framework name to its state.
        decisions: what was chosen, oldest first.
        notes: what else a reader should know, such as why nothing was installed.
    """

    enabled: bool
    features: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    frameworks: Mapping[str, FrameworkStatus] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshot as plain dicts, lists, strings and numbers, ready for JSON."""
        return {
            "enabled": self.enabled,
            "features": list(self.features),
            "settings": dict(self.settings),
            "frameworks": {
                name: {
                    "version": one.version,
                    "state": one.state,
                    "reason": one.reason,
                    "seams": [asdict(seam) for seam in one.seams],
                }
                for name, one in self.frameworks.items()
            },
            "decisions": [asdict(decision) for decision in self.decisions],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"precision_shim: {'on' if self.enabled else 'off'}"]
        if self.enabled:
            lines.append(f"features: {', '.join(self.features) or 'none'}")
            lines.append("settings: " + ", ".join(f"{k}={v}" for k, v in self.settings.items()))
        for name, one in self.frameworks.items():
            lines += ["", f"{name} {one.version or ''}".rstrip() + f": {one.state}"]
            lines += _indented(one.reason, 2) if one.reason else []
            for feature in dict.fromkeys(seam.feature for seam in one.seams):
                lines.append(f"  {feature}")
                for seam in one.seams:
                    if seam.feature == feature:
                        lines += _indented(f"{seam.state:<8} {seam.target}", 4)
                        lines += _indented(seam.reason, 13) if seam.reason else []
        if self.decisions:
            lines += ["", "decisions"]
            for decision in self.decisions:
                lines += _indented(str(decision), 2)
        for note in self.notes:
            lines += ["", *_indented(note, 0)]
        return "\n".join(_folded(lines))


def _indented(text: str, by: int) -> list[str]:
    return [" " * by + line for line in text.splitlines()]


def _folded(lines: Sequence[str], width: int = 80) -> list[str]:
    import textwrap

    folded: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        folded += textwrap.wrap(
            line,
            width,
            subsequent_indent=indent + "  ",
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return folded
