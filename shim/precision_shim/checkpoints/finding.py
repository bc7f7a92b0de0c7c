"""Find the checkpoints in a directory, with their framework and models. Needs no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointUnreadableError
from ..process.registry import checkpoints
from .layout import Part
from .units import DCP, MEGATRON, SAFETENSORS, SHARDS, kind_of, read_unit

__all__ = ["find", "saying_how_to_go_on"]

_GIVE = "Give the directory of a run, of a step, of a model, or of its files."

_DEPTH = 5
"""Maximum number of nested directories in which a model's files are searched."""

_MOST = 20_000
"""Maximum number of directories in which a model's files are searched."""

_ORDER = (MEGATRON, DCP, SHARDS, SAFETENSORS)
"""Kinds of files, from the most to the least likely to contain a model's optimizer states."""


def find(path: Path, framework: str | None = None) -> list[Part]:
    """Find a checkpoint's models and read their files; in a run's directory, use the last step.

    Args:
        path: the directory of a run, of a step, of a model, or of the files themselves.
        framework: the framework that wrote the checkpoint; ``None`` to infer the framework from
            the directories' names.

    Raises:
        CheckpointUnreadableError: the checkpoint is missing or incomplete; the message has a
            remedy.
    """
    if not path.exists():
        raise CheckpointUnreadableError(f"{path}: there is no such directory. {_GIVE}")
    if not path.is_dir():
        raise CheckpointUnreadableError(f"{path}: a file. {_GIVE}")
    with _searching(path):
        step = _last_step(path)
        top = step or path
        found = _units_in(top, _DEPTH, set())
    notes = [f"the last of the steps there: {step.name}"] if step is not None else []
    if not found:
        raise CheckpointUnreadableError(f"{path}: {_what_is_there(top)}. {_GIVE}{_instead(top)}")
    whose = framework or _framework_of(top)
    parts: dict[Path, list[tuple[Path, str]]] = {}
    for directory, kind in found:
        model = _model_of(directory, top)
        parts.setdefault(model or top, []).append((directory, kind))
    with saying_how_to_go_on(path):
        return [_part(whose, folder, units, notes) for folder, units in sorted(parts.items())]


def _part(framework: str, path: Path, all_units: list[tuple[Path, str]], notes: list[str]) -> Part:
    kinds = {kind for _, kind in all_units}
    kind = next(first for first in _ORDER if first in kinds)
    units = tuple(read_unit(folder, its) for folder, its in sorted(all_units) if its == kind)
    known = {name for row in checkpoints().values() for name in row.models}
    subject = next((name for name in (path.name, *_names(path)) if name in known), "")
    beside = tuple(unit for unit in sorted(all_units) if unit[1] != kind)
    return Part(framework, subject, path, units, kind, beside, notes=list(notes))


def _names(path: Path) -> list[str]:
    return [parent.name for parent in path.parents][:_DEPTH]


class _TooManyError(Exception):
    """More than ``_MOST`` directories were searched."""


@contextmanager
def _searching(path: Path) -> Iterator[None]:
    """Context manager: convert an error of the search into an error with a reason and a remedy.

    Raises:
        CheckpointUnreadableError: a checkpoint is incomplete, a directory cannot be read, or there
            are too many directories.
    """
    try:
        yield
    except CheckpointUnreadableError as error:
        raise CheckpointUnreadableError(f"{error} {_go_on(path)}") from error
    except OSError as error:
        raise CheckpointUnreadableError(
            f"{error.filename or path}: it cannot be read ({error.strerror or error}). Make it "
            f"readable, or look in another directory. {_GIVE}"
        ) from error
    except _TooManyError as error:
        raise CheckpointUnreadableError(
            f"{path}: no checkpoint in the first {_MOST} directories. {_GIVE}"
        ) from error


def _units_in(path: Path, depth: int, seen: set[Path]) -> list[tuple[Path, str]]:
    real = path.resolve()  # links may form a cycle
    if real in seen:
        return []
    seen.add(real)
    if len(seen) > _MOST:
        raise _TooManyError
    kind = kind_of(path)
    if kind is not None:
        return [(path, kind)]
    units = []
    if depth:
        for entry in sorted(path.iterdir()):
            if entry.is_dir() and not entry.name.startswith("."):
                units += _units_in(entry, depth - 1, seen)
    return units


def _last_step(path: Path) -> Path | None:
    steps = _steps(path)
    return max(steps, key=lambda step: steps[step], default=None)


def _steps(path: Path) -> dict[Path, int]:
    """Map each step's directory in a run's directory to the number of the step."""
    return {
        path / name: number
        for name in os.listdir(path)
        if (number := _number_of(name)) is not None and (path / name).is_dir()
    }


def _number_of(name: str) -> int | None:
    """Return a step's number from its directory's name; ``None`` for any other name."""
    for row in checkpoints().values():
        match = re.fullmatch(row.steps, name)
        if match:
            return int(match[1])
    return None


@contextmanager
def saying_how_to_go_on(path: Path) -> Iterator[None]:
    """Context manager: append a remedy to the message of an error about a damaged checkpoint.

    Raises:
        CheckpointUnreadableError: a damaged or foreign file caused an error of any type.
    """
    try:
        yield
    except CheckpointUnreadableError as error:
        raise CheckpointUnreadableError(f"{error} {_go_on(path)}") from error
    except Exception as error:
        why = " ".join(str(error).split())[:120]
        raise CheckpointUnreadableError(
            f"{path}: a checkpoint in a form that is not known ({type(error).__name__}: {why}). "
            f"{_go_on(path)}"
        ) from error


def _go_on(path: Path) -> str:
    before = _step_before(path)
    other = f"the checkpoint before it, {before}," if before else "another checkpoint"
    return f"Take {other} or bring what is damaged or missing back from a copy."


def _step_before(path: Path) -> Path | None:
    """Return the step before the step that contains ``path`` (for a run: before its last step)."""
    try:
        whole = _last_step(path.absolute()) or path.absolute()
        for parent in (whole, *whole.parents):
            own = _number_of(parent.name)
            if own is not None and parent.is_dir():
                steps = _steps(parent.parent)
                earlier = {other: number for other, number in steps.items() if number < own}
                return max(earlier, key=lambda other: earlier[other], default=None)
    except OSError:
        pass
    return None


def _instead(path: Path) -> str:
    before = _step_before(path)
    return f" The step before it is {before}." if before is not None else ""


def _framework_of(path: Path) -> str:
    """Return the framework whose directory names match; empty if none or several match."""
    fits = {}
    whole = path.absolute()
    for name, row in checkpoints().items():
        for step in (whole, *whole.parents):
            if re.fullmatch(row.steps, step.name):
                models = [model for model in row.models if (step / model).is_dir()]
                if models or not row.models:
                    fits[name] = len(models)
                break
    best = [name for name, count in fits.items() if count == max(fits.values())]
    return best[0] if len(best) == 1 else ""


def _model_of(directory: Path, top: Path) -> Path | None:
    known = {name for row in checkpoints().values() for name in row.models}
    for parent in (directory, *directory.parents):
        if parent.name in known:
            return parent
        if parent == top:
            break
    return None


def _what_is_there(path: Path) -> str:
    try:
        inside: list[str] = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"
    if not inside:
        return "the directory is empty"
    shown = ", ".join(inside[:4]) + (", ..." if len(inside) > 4 else "")
    return f"no checkpoint of a kind that is known here (it has {shown})"
