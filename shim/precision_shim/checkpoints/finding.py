"""Which checkpoints a path holds: of which framework, of which models. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precision_shim_adapters.frameworks import CHECKPOINTS

from ..errors import CheckpointUnreadableError
from .layout import Part
from .units import DCP, MEGATRON, SAFETENSORS, SHARDS, kind_of, read_unit

__all__ = ["find"]

_DEPTH = 5
"""How many directories deep a model's files may lie."""

_ORDER = (MEGATRON, DCP, SHARDS, SAFETENSORS)
"""Of several kinds in one model's directory, the one that has the optimizer's states."""


@dataclass(frozen=True)
class _Step:
    """A directory of one step."""

    path: Path
    number: int
    framework: str


def find(path: Path, framework: str | None = None) -> list[Part]:
    """The models of a checkpoint, with what is in their files; of a run's directory, the last step.

    Args:
        path: a run's directory, a step's, a model's, or that of the files themselves.
        framework: whose directory it is; ``None`` to tell by its shape.

    Raises:
        CheckpointUnreadableError: there is no checkpoint, or one that is not whole.
    """
    if not path.exists():
        raise CheckpointUnreadableError(f"{path}: there is no such directory.")
    if not path.is_dir():
        raise CheckpointUnreadableError(
            f"{path}: a file; give the directory of a checkpoint or of a run."
        )
    step = _last_step(path)
    notes = [f"the last of the steps there: {step.path.name}"] if step is not None else []
    top = path if step is None else step.path
    found = _units_in(top, _DEPTH)
    if not found:
        raise CheckpointUnreadableError(f"{path}: {_what_is_there(path)}.")
    whose = framework or (step.framework if step else None) or _framework_of(top, found)
    parts: dict[Path, list[tuple[Path, str]]] = {}
    for directory, kind in found:
        model = _model_of(directory, top)
        parts.setdefault(model or top, []).append((directory, kind))
    return [_part(whose, one, top, units, notes) for one, units in sorted(parts.items())]


def _part(
    framework: str, path: Path, top: Path, found: list[tuple[Path, str]], notes: list[str]
) -> Part:
    kinds = {kind for _, kind in found}
    kind = next(one for one in _ORDER if one in kinds)
    # Exports for inference lie beside what a resume reads.
    taken = [one for one in found if one[1] == kind or kind == MEGATRON] if kind != DCP else found
    units = tuple(read_unit(directory, one) for directory, one in sorted(taken))
    known = {name for row in CHECKPOINTS.values() for name in row["models"]}
    subject = next((name for name in (path.name, *_names(path)) if name in known), "")
    return Part(framework, subject, path, units, kind, notes=list(notes))


def _names(path: Path) -> list[str]:
    return [one.name for one in path.parents][:_DEPTH]


def _units_in(path: Path, depth: int) -> list[tuple[Path, str]]:
    kind = kind_of(path)
    if kind is not None:
        return [(path, kind)]
    found = []
    if depth:
        for one in sorted(path.iterdir()):
            if one.is_dir() and not one.name.startswith("."):
                found += _units_in(one, depth - 1)
    return found


def _last_step(path: Path) -> _Step | None:
    """The step of a run's directory that the run would resume from."""
    steps = []
    for framework, row in CHECKPOINTS.items():
        for one in path.iterdir():
            match = re.fullmatch(row["steps"], one.name)
            if match and one.is_dir():
                steps.append(_Step(one, int(match[1]), framework))
    if not steps:
        return None
    last = max(steps, key=lambda one: one.number)
    same = {one.framework for one in steps if one.path == last.path}
    if len(same) > 1:
        shape = _framework_of(last.path, _units_in(last.path, _DEPTH))
        last = _Step(last.path, last.number, shape)
    return last


def _framework_of(path: Path, found: list[tuple[Path, str]]) -> str:
    """The framework that names directories so; empty where several do, or none."""
    fits: dict[str, int] = {}
    for name, row in CHECKPOINTS.items():
        inside = {
            part for directory, _ in found for part in directory.relative_to(path.parent).parts
        } | set(path.parts)
        step = any(re.fullmatch(row["steps"], part) for part in inside)
        model = bool(inside & set(row["models"])) if row["models"] else step
        own = all(_has(path, found, pattern) for pattern in row.get("has", ()))
        if model and (step or own):
            fits[name] = 1 + bool(row.get("has")) * own
    best = [name for name, points in fits.items() if points == max(fits.values())]
    return best[0] if len(best) == 1 else ""


def _has(path: Path, found: list[tuple[Path, str]], pattern: str) -> bool:
    return any(directory.match(pattern) for directory, _ in found)


def _model_of(directory: Path, top: Path) -> Path | None:
    """The directory of the model that files belong to, by its name."""
    known = {name for row in CHECKPOINTS.values() for name in row["models"]}
    for one in (directory, *directory.parents):
        if one.name in known:
            return one
        if one == top:
            break
    return None


def _what_is_there(path: Path) -> str:
    try:
        inside: list[str] = sorted(one.name for one in path.iterdir())
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"
    if not inside:
        return "the directory is empty"
    shown = ", ".join(inside[:4]) + (", ..." if len(inside) > 4 else "")
    return f"no checkpoint of a kind that is known here (it has {shown})"


def declared(framework: str) -> Mapping[str, Any]:
    """The row of a framework; empty for none."""
    row: Mapping[str, Any] = CHECKPOINTS.get(framework, {})
    return row
