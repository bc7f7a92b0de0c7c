"""Find the checkpoints in a directory, with their framework and models. Needs no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from precision_shim.errors import CheckpointUnreadableError
from precision_shim.process.registry import checkpoints

from .layout import CheckpointPart
from .tensors import reading
from .units import kind_of, read_unit

_GIVE = "Give the directory of a run, of a step, of a model, or of its files."

_NAMED = 3
"""Maximum number of files that the message of an unknown directory names."""

_DEPTH = 5
"""Maximum number of nested directories in which a model's files are searched."""

_ORDER = ("megatron", "dcp", "shards", "safetensors")
"""Kinds of files, from the most to the least likely to contain a model's optimizer states."""


def search(path: Path) -> tuple[Path, list[tuple[Path, str]]]:
    """Search the directories that contain a checkpoint's files; in a run, in the last step only.

    Returns:
        The directory that was searched, and each directory with files, with the kind of the files.

    Raises:
        CheckpointUnreadableError: it is missing or incomplete; the message has a remedy.
    """
    if not path.is_dir():
        what = "this is a file" if path.is_file() else "there is no such directory"
        raise CheckpointUnreadableError(f"{path}: {what}. {_GIVE}")
    with reading(path):
        top = _last_step(path) or path
        found = _units_in(top, _DEPTH, set())
    if not found:
        names = sorted(os.listdir(top))
        here = ", ".join(names[:_NAMED]) + " and others" * (len(names) > _NAMED)
        raise CheckpointUnreadableError(
            f"{top}: it has no checkpoint of a known kind (.metadata with *.distcp, "
            "model_world_size_N_rank_I.pt and the like, *.safetensors), but "
            f"{here or 'nothing at all'}. {_GIVE}"
        )
    return top, found


def read_units(
    top: Path, found: list[tuple[Path, str]], framework: str | None
) -> list[CheckpointPart]:
    """Read the files that ``search`` found in ``top``; ``framework=None`` infers it from names.

    Raises:
        CheckpointUnreadableError: the checkpoint is incomplete or damaged.
    """
    whose = framework or _framework_of(top)
    names = {name for row in checkpoints().values() for name in row.models}
    models: dict[tuple[Path, str], list[tuple[Path, str]]] = {}
    for directory, kind in found:
        above = (place for place in (directory, *directory.parents) if place.name in names)
        model = next(above, None)
        path = model if model is not None and model.is_relative_to(top) else top
        models.setdefault((path, model.name if model else ""), []).append((directory, kind))
    parts = []
    for (path, subject), places in sorted(models.items()):
        kind = min((kind for _, kind in places), key=_ORDER.index)
        units = tuple(read_unit(*place) for place in places if place[1] == kind)
        beside = tuple(place for place in places if place[1] != kind)
        parts.append(CheckpointPart(whose, subject, path, units, kind, beside))
    return parts


def _units_in(path: Path, depth: int, seen: set[Path]) -> list[tuple[Path, str]]:
    real = path.resolve()  # links may form a cycle
    if real in seen:
        return []
    seen.add(real)
    kind = kind_of(path)
    if kind not in (None, "safetensors") or not depth:
        return [(path, kind)] if kind else []
    below = (each for each in sorted(path.iterdir()) if not each.name.startswith("."))
    units = [unit for each in below if each.is_dir() for unit in _units_in(each, depth - 1, seen)]
    if kind is None:
        return units
    # ROLL saves the optimizer's states beneath weights for Hugging Face.
    return [(path, kind), *(unit for unit in units if unit[1] != kind)]


def _last_step(path: Path) -> Path | None:
    steps = {
        path / name: int(match[1])
        for name in os.listdir(path)
        for row in checkpoints().values()
        if (match := re.fullmatch(row.steps, name)) and (path / name).is_dir()
    }
    return max(steps, key=lambda step: steps[step], default=None)


def _framework_of(path: Path) -> str:
    """Return the framework whose directory names match; empty if none or several match."""
    fits = {}
    whole = path.absolute()
    for name, row in checkpoints().items():
        places = (whole, *whole.parents)
        step = next((place for place in places if re.fullmatch(row.steps, place.name)), None)
        if step is not None:
            models = [model for model in row.models if (step / model).is_dir()]
            if models or not row.models:
                fits[name] = len(models)
    best = [name for name, count in fits.items() if count == max(fits.values())]
    return best[0] if len(best) == 1 else ""
