"""The checkpoint doctor's result, as text and in a form for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .foretelling import Here, foretell, remedy
from .layout import (
    COMPONENTS,
    EXACT,
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    NOT_HERE,
    PARAMS,
    Outcome,
    Part,
)
from .reading import read_parts

__all__ = ["Examined", "examine"]

_KINDS = {
    "megatron": "Megatron's distributed checkpoint",
    "dcp": "torch's distributed checkpoint",
    "shards": "a file of each rank",
    "safetensors": "safetensors",
}
_LABELS = {PARAMS: "parameters", MASTER: "masters"}


def size_text(count: int) -> str:
    """Return a number of bytes as text, such as ``"1.5 GiB"``."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


@dataclass(frozen=True)
class Examined:
    """One model of a checkpoint, and the predicted result of its resume.

    Attributes:
        part: the content of the model's files.
        outcome: predicted result of a resume in this environment.
        remedy: the setting that makes an inexact resume exact; empty if the resume is exact or no
            setting makes it exact.
    """

    part: Part
    outcome: Outcome
    remedy: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the result as lines of text."""
        part = self.part
        whose = " ".join(word for word in (part.framework, part.subject) if word)
        yield f"{part.path}" + (f": {whose}" if whose else "")
        rows: list[tuple[str, str]] = []
        sharding = part.facts.get("sharding")
        ranks = part.units[0].world_size
        written = _KINDS[part.kind]
        written += f", {sharding}" if sharding else f", {ranks} ranks" if ranks else ""
        rows.append(("written as", written))
        for name in COMPONENTS:
            dtypes = part.dtypes(name)
            if dtypes:
                rows.append((_LABELS.get(name, name), self._held(name, dtypes)))
            elif name == MASTER:
                rows.append((_LABELS[name], "none: the parameters are all there is"))
        scaler = part.scaler
        told = f"{scaler.state}: {scaler.text}" if scaler.text else scaler.state
        rows.append(("loss scaler", told))
        rows += [("note", note) for note in part.notes]
        rows.append(("resumed here", f"{self.outcome.verdict}: {self.outcome.because}"))
        if self.outcome.verdict not in (EXACT, NOT_HERE):
            how = self.remedy or "no setting: begin from the weights, or take another checkpoint"
            rows.append(("exact with", how))
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            yield f"  {name.ljust(width)}  {text}"

    def _held(self, name: str, dtypes: dict[str, int]) -> str:
        part = self.part
        what = ", ".join(dtypes)
        if name == MASTER:
            what = part.masters
        elif name in (EXP_AVG, EXP_AVG_SQ) and part.moments.get(name):
            what += f", every value a {part.moments[name][0]} number"
        return f"{what}: {sum(dtypes.values()):,} elements, {size_text(part.bytes(name))}"

    def to_dict(self) -> dict[str, Any]:
        """Return the result in a form for JSON."""
        part = self.part
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
            "fits": {name: list(dtypes) for name, dtypes in part.moments.items()},
            "scaler": {
                "state": part.scaler.state,
                "where": part.scaler.where,
                "found": part.scaler.text,
            },
            "resume": {
                "exact": self.outcome.exact,
                "verdict": self.outcome.verdict,
                "because": self.outcome.because,
                "exact_with": self.remedy or None,
            },
            "notes": part.notes,
        }


def examine(path: str | Path, here: Here, framework: str | None = None) -> list[Examined]:
    """Read a checkpoint, and predict how its resume ends.

    Args:
        path: the directory of a run, of a step, of a model, or of the files themselves.
        here: the environment of the resume.
        framework: the framework that wrote the checkpoint. If ``framework`` is ``None``, infer it
            from directory names, or else use the only installed framework that can read the files.

    Raises:
        CheckpointUnreadableError: there is no checkpoint, or it is incomplete or damaged.
    """
    examined = []
    for part in read_parts(path, framework):
        if not part.framework:
            part.framework = here.only_framework(part.kind)
        outcome = foretell(part, here)
        how = "" if outcome.verdict in (EXACT, NOT_HERE) else remedy(part, here)
        examined.append(Examined(part, outcome, how))
    return examined
