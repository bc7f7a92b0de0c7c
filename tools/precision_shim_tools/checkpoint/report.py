"""The checkpoint doctor's result, as text and in a form for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .layout import COMPONENTS, CheckpointPart, Outcome
from .prediction import Here, only_framework, predict_resume, remedy
from .reading import read_parts

_SETTLED = ("exact", "not here", "not known")
"""The verdicts that no setting changes."""


def escaped(text: str) -> str:
    """Escape what is not printable, so that no name in a checkpoint makes a line of its own."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


@dataclass(frozen=True)
class Examined:
    """One model of a checkpoint, and the predicted result of its resume.

    Attributes:
        part: the content of the model's files.
        outcome: predicted result of a resume in this environment.
        remedy: the setting that makes an inexact resume exact; empty if there is none.
    """

    part: CheckpointPart
    outcome: Outcome
    remedy: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the result as lines of text."""
        yield from map(escaped, self._lines())

    def _lines(self) -> Iterator[str]:
        part, unit = self.part, self.part.units[0]
        whose = f"{part.framework} {part.subject}".strip()
        yield f"{part.path}" + (f": {whose}" if whose else "")
        ranks = f"{unit.world_size} ranks" if unit.world_size else ""
        written = [part.kind, part.facts.get("sharding"), ranks]
        rows = [("written as", ", ".join(word for word in written if word))]
        rows += [(name, self._held(name)) for name in COMPONENTS if part.held.get(name)]
        scaler = part.scaler
        rows.append(("loss scaler", f"{scaler.state}: {scaler.text}".removesuffix(": ")))
        rows += [("note", note) for note in part.notes]
        rows.append(("resumed here", f"{self.outcome.verdict}: {self.outcome.because}"))
        if self.outcome.verdict not in _SETTLED:
            how = self.remedy or "no setting: begin from the weights, or take another checkpoint"
            rows.append(("exact with", how))
        for name, text in rows:
            yield f"  {name.ljust(12)}  {text}"

    def _held(self, name: str) -> str:
        part = self.part
        dtypes = part.dtypes(name)
        what = part.masters if name == "master" else ", ".join(dtypes)
        if part.bf16_moments.get(name):
            what += ", every value a bf16 number"
        return f"{what}: {sum(dtypes.values()):,} elements, {part.bytes(name):,} bytes"

    def to_dict(self) -> dict[str, Any]:
        """Return the result in a form for JSON."""
        part, scaler = self.part, self.part.scaler
        return {
            "framework": part.framework,
            "subject": part.subject,
            "path": str(part.path),
            "kind": part.kind,
            "sharding": part.facts.get("sharding"),
            "components": {
                name: {
                    "dtypes": part.dtypes(name),
                    "elements": sum(part.dtypes(name).values()),
                    "bytes": part.bytes(name),
                }
                for name in COMPONENTS
                if part.held.get(name)
            },
            "masters": part.masters,
            "fits": {name: ["bf16"] * fits for name, fits in part.bf16_moments.items()},
            "scaler": {"state": scaler.state, "where": scaler.where, "found": scaler.text},
            "resume": {
                "exact": self.outcome.exact,
                "verdict": self.outcome.verdict,
                "because": self.outcome.because,
                "exact_with": self.remedy or None,
            },
            "unknown": sorted(part.unknown),
            "notes": part.notes,
        }


def examine(path: str | Path, here: Here, framework: str | None = None) -> list[Examined]:
    """Read a checkpoint, and predict how its resume ends.

    Args:
        path: the directory of a run, of a step, of a model, or of the files themselves.
        here: the environment of the resume.
        framework: the writer; ``None`` to infer it from names, or from what is installed.

    Raises:
        CheckpointUnreadableError: there is no checkpoint, or it is incomplete or damaged.
    """
    examined = []
    for part in read_parts(path, framework):
        if not part.framework:
            part.framework = only_framework(part.kind)
        outcome = predict_resume(part, here)
        how = "" if outcome.verdict in _SETTLED else outcome.how or remedy(part, here)
        examined.append(Examined(part, outcome, how))
    return examined
