"""Read the content of a checkpoint, model by model.

Only the values show whether fp32 masters are really remainders (int16 low bits), and whether fp32
moments were in bf16 before. Samples of these values are read if torch is installed.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from precision_shim.errors import CheckpointUnreadableError
from precision_shim.files.pickles import dicts_in
from precision_shim.process.registry import checkpoint_readers
from precision_shim.scaling.belonging import files_beneath
from precision_shim.scaling.record import FILE_NAME, Verdict, bad_record, parse_bytes, read_file

from .finding import read_units, search
from .layout import FLOATS, MOMENTS, NUMBERS, REMAINDERS, UNKNOWN, CheckpointPart, Scaler
from .tensors import Tensor
from .units import Unit, read_unit
from .unknown import find_unknown, is_state

_RECORD_KEY = "precision_shim_scaler"


def read_parts(path: str | Path, framework: str | None = None) -> list[CheckpointPart]:
    """Read a checkpoint's models.

    Raises:
        CheckpointUnreadableError: there is no checkpoint, or it is incomplete or damaged.
    """
    top, found = search(Path(path))
    try:
        parts = read_units(top, found, framework)
        for part in parts:
            if top != Path(path):
                part.notes.append(f"the last of the steps there: {top.name}")
            _sort(part)
            find_unknown(part, top, {other.path for other in parts} - {part.path})
        if not any(part.held for part in parts):
            raise CheckpointUnreadableError(f"{path}: its files hold no tensor.")
    except Exception as error:  # a damaged or foreign file may cause any error
        what = str(error)
        if not isinstance(error, CheckpointUnreadableError):
            why = f"{type(error).__name__}: {error}"
            what = f"{path}: a checkpoint in a form that is not known ({why})."
        raise CheckpointUnreadableError(
            f"{what} Take another checkpoint or bring what is damaged or missing back from a copy."
        ) from error
    return parts


def _sort(part: CheckpointPart) -> None:
    readers = checkpoint_readers(part.framework)
    for unit in part.units:
        place = readers.get(unit.kind)
        take = pkgutil.resolve_name(place) if place else _take
        take(unit, part)
        part.read[unit.path] = unit.kind
    for directory, kind in part.beside:
        if not part.held.get("params"):
            _take(read_unit(directory, kind), part)
            part.read[directory] = kind
    part.scaler = _scaler_of(part)
    _look_at_values(part)


def _take(unit: Unit, part: CheckpointPart) -> None:
    """Sort tensors into components by words in their keys, such as ``exp_avg``."""
    for key, tensor in unit.tensors.items():
        words = key.split(".")
        weights = tensor.dtype[:2] in ("fp", "bf", "fl") and not words[-1].startswith("_")
        if words[-1] in MOMENTS:
            part.add(words[-1], tensor)
        elif words[-1] in ("master_param", "master_weight"):
            part.add("master", tensor)
        elif is_state(unit, key):
            part.add("other", tensor)
        elif not _is_record(words):
            part.add("params" if weights and "train_state" not in words else "other", tensor)
            if "train_state" in words and tensor.dtype in FLOATS and tensor.elements > 1:
                part.unknown[key] = True


def _is_record(words: list[str]) -> bool:
    return words[-1].startswith(_RECORD_KEY)


def _scaler_of(part: CheckpointPart) -> Scaler:
    verdict = Verdict.together([*_verdicts(part)] or [Verdict("")])
    where, saved, fault = verdict.where, verdict.saved, verdict.damage or verdict.another
    if fault:
        why = fault.removeprefix(f"{where}: ").partition(". ")[0]
        return Scaler("damaged" if verdict.damage else "of another save", where, why, saved)
    if saved is None:
        return _judge_native(part)
    text = f"scale {saved.scale:g}, {saved.growth_tracker} good steps, {saved.skipped} skipped"
    return Scaler("whole", where, text, saved)


def _verdicts(part: CheckpointPart) -> Iterator[Verdict]:
    """Judge each record, and the files beside it, as a worker does."""
    places = {unit.path for unit in part.units} | {unit.path.parent for unit in part.units}
    places |= {part.path, *(place / "optimizer" for place in (*places, part.path))}
    for directory in sorted(places):
        file = directory / FILE_NAME
        if file.is_file():
            beside = files_beneath(directory)
            for name in ("weights", "model", "optim"):
                beside |= files_beneath(directory.parent / name, f"../{name}/")
            if world := part.units[0].world_size:
                mine = f"_world_size_{world}_"
                beside = {name: path for name, path in beside.items() if mine in name}
            yield Verdict.of(partial(read_file, file), str(file)).beside(beside)
            return
    for unit in part.units:
        keys = [key for key in (*unit.tensors, *unit.objects) if _is_record(key.split("."))]
        for key in keys:
            where = f"{unit.path} ({key})"
            yield Verdict.of(partial(_of_tensor, unit.tensors.get(key), where), where)
        if keys:
            return
        for archive in unit.common:
            beside = files_beneath(archive.path.parent)
            for node in dicts_in(archive.tree):
                if _RECORD_KEY in node:
                    verdict = Verdict.of(partial(node.get, _RECORD_KEY), str(archive.path))
                    yield verdict.beside(beside, named=True)


def _of_tensor(tensor: Tensor | None, where: str) -> object:
    if tensor is None or tensor.dtype != "uint8":
        what = "an object" if tensor is None else f"a tensor of {tensor.dtype}"
        raise bad_record(where, f"{what} where a tensor of bytes was expected")
    content = b"".join(part(tensor.elements) for part in tensor.parts)
    return parse_bytes(content, where)


_NATIVE = ("scale", "growth_tracker", "hysteresis_tracker")


def _judge_native(part: CheckpointPart) -> Scaler:
    """Check the framework's scaler records, one for each chained optimizer."""
    if not part.scalers:
        return Scaler("none")
    where = str(part.path)
    states = {tuple(scaler.get(name) for name in _NATIVE) for scaler in part.scalers}
    for state in states:
        for name, value in zip(_NATIVE, state, strict=True):
            fits = type(value) is int
            if name == "scale":
                fits = type(value) is float and 0.0 < value < math.inf
            if not fits:
                return Scaler("damaged", where, f"its {name} is {value!r}")
    part.facts["scalers_differ"] = len(states) > 1
    texts = (f"scale {a:g}, {b} good steps, hysteresis {c}" for a, b, c in sorted(states))
    return Scaler("whole", where, "; ".join(texts))


def _look_at_values(part: CheckpointPart) -> None:
    masters = part.held.get("master")
    if masters:
        part.masters = REMAINDERS if "int16" in part.dtypes("master") else UNKNOWN
    if find_spec("torch") is None:
        if part.masters == UNKNOWN:
            part.notes.append("torch is not installed here: no values were looked at")
        return
    from .values import are_bf16, are_numbers

    numbers = are_numbers(masters) if masters and part.masters == UNKNOWN else None
    if numbers is not None:
        part.masters = NUMBERS if numbers else "fp32"
    part.bf16_moments = {name: are_bf16(part.held[name]) for name in MOMENTS if part.held.get(name)}
