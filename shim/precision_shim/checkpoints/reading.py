"""Read the content of a checkpoint, model by model.

If torch is installed, samples of masters and moments are read too. Only the values show whether
fp32 masters are really remainders (int16 low bits), and whether fp32 moments were in bf16 before.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import CheckpointUnreadableError, ScalerCheckpointError
from ..precision.belonging import files_beneath, fingerprints, foreign
from ..precision.scaler_record import FILE_NAME, KIND, parse, parse_bytes, read_record, state_of
from ..process.registry import checkpoint_readers
from .finding import find, saying_how_to_go_on
from .layout import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    NUMBERS,
    OTHER,
    PARAMS,
    REMAINDERS,
    UNKNOWN,
    WHOLE,
    Part,
    Scaler,
)
from .pickles import dicts_in
from .tensors import Tensor
from .units import Unit, read_unit

__all__ = ["read_parts"]

_RECORD_KEY = "precision_shim_scaler"
_SAMPLE = 64 << 20
"""Maximum number of bytes that are read of a component; a smaller component is read whole."""


def read_parts(path: str | Path, framework: str | None = None) -> list[Part]:
    """Read a checkpoint's models.

    Raises:
        CheckpointUnreadableError: there is no checkpoint, or it is incomplete.
    """
    parts = find(Path(path), framework)
    with saying_how_to_go_on(Path(path)):
        for part in parts:
            _sort(part)
        if not any(part.held for part in parts):
            raise CheckpointUnreadableError(f"{path}: its files hold no tensor.")
    return parts


def _sort(part: Part) -> None:
    readers = checkpoint_readers(part.framework)
    for unit in part.units:
        place = readers.get(unit.kind)
        take = pkgutil.resolve_name(place) if place else _take
        take(unit, part)
    for directory, kind in part.beside:
        if not part.held.get(PARAMS):
            _take(read_unit(directory, kind), part)
    part.scaler = _scaler_of(part)
    _look_at_values(part)


_OPTIMIZERS = ("optim", "optimizer", "optimizers")


def _take(unit: Unit, part: Part) -> None:
    """Sort tensors into components by words in their keys, such as ``exp_avg``."""
    for key, tensor in unit.tensors.items():
        words = key.split(".")
        if words[-1] == _RECORD_KEY:
            continue
        if words[-1] in (EXP_AVG, EXP_AVG_SQ):
            part.add(words[-1], tensor)
        elif words[-1] in ("master_param", "master_weight"):
            part.add(MASTER, tensor)
        elif words[0] in _OPTIMIZERS or unit.path.name in _OPTIMIZERS:
            part.add(OTHER, tensor)
        else:
            weights = tensor.dtype[:2] in ("fp", "bf", "fl") and not words[-1].startswith("_")
            part.add(PARAMS if weights and "train_state" not in words else OTHER, tensor)


def _scaler_of(part: Part) -> Scaler:
    places = {unit.path for unit in part.units} | {unit.path.parent for unit in part.units}
    places |= {part.path, *(place / "optimizer" for place in (*places, part.path))}
    for directory in sorted(places):
        file = directory / FILE_NAME
        if file.is_file():
            return _judge_file(file)
    for unit in part.units:
        for key in (*unit.tensors, *unit.objects):
            if key.rpartition(".")[2] == _RECORD_KEY:
                return _judge_tensor(unit.tensors.get(key), f"{unit.path} ({key})")
    records = [
        (archive.path, record)
        for unit in part.units
        for archive in unit.common
        for record in _records_in(archive.tree)
    ]
    return _judge_all(records) if records else _judge_native(part)


def _judge_file(file: Path) -> Scaler:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return Scaler("damaged", str(file), f"it cannot be read ({error})")
    judged = _judge(partial(parse, text, str(file)), str(file))
    return _check_save(judged, files_beneath(file.parent))


def _check_save(judged: Scaler, files: Mapping[str, str | Path]) -> Scaler:
    """Check by fingerprints that a valid scaler record and files beside it are from one save."""
    if judged.saved is None or judged.saved.files is None:
        return judged
    others = foreign(judged.saved.files, fingerprints(files))
    if not others:
        return judged
    text = f"{others[0]} is not the file that it was written with"
    return Scaler("of another save", judged.where, text, judged.saved)


def _judge(make: Callable[[], object], where: str) -> Scaler:
    try:
        saved = read_record(make(), where)
    except ScalerCheckpointError as error:
        return Scaler("damaged", where, str(error).removeprefix(f"{where}: ").partition(". ")[0])
    text = f"scale {saved.scale:g}, {saved.growth_tracker} good steps, {saved.skipped} skipped"
    return Scaler("whole", where, text, saved)


def _judge_tensor(tensor: Tensor | None, where: str) -> Scaler:
    if tensor is None or tensor.dtype != "uint8":
        what = "an object" if tensor is None else f"a tensor of {tensor.dtype}"
        return Scaler("damaged", where, f"{what} where a tensor of bytes was expected")
    content = b"".join(part(tensor.elements) for part in tensor.parts)
    return _judge(partial(parse_bytes, content, where), where)


def _judge_all(records: list[tuple[Path, dict[str, Any]]]) -> Scaler:
    """Check the records in the ranks' own files, all of which a resume reads."""
    judged = [_judge(partial(dict, record), str(file)) for file, record in records]
    broken = [verdict for verdict in judged if verdict.state != "whole"]
    if broken:
        return broken[0]
    if len({state_of(record) for _, record in records}) > 1:
        return Scaler("damaged", judged[0].where, "the ranks' files hold different states")
    for (file, _), verdict in zip(records, judged, strict=True):
        # Compare each record only with files that the record names and that exist.
        beside = files_beneath(file.parent)
        named = verdict.saved.files or {}
        held = _check_save(verdict, {name: beside[name] for name in named if name in beside})
        if held.state != "whole":
            return held
    return judged[0]


def _records_in(tree: Any) -> Iterator[dict[str, Any]]:
    def has_one(node: dict[Any, Any]) -> bool:
        return node.get("kind") == KIND or _RECORD_KEY in node

    for node in filter(has_one, dicts_in(tree, leave=has_one)):
        record = node if node.get("kind") == KIND else node[_RECORD_KEY]
        yield record if isinstance(record, dict) else {}


_NATIVE = ("scale", "growth_tracker", "hysteresis_tracker")


def _judge_native(part: Part) -> Scaler:
    """Check the framework's own scaler records, one for each chained optimizer."""
    if not part.scalers:
        return Scaler("none")
    where = str(part.path)
    for scaler in part.scalers:
        lacking = [name for name in _NATIVE if scaler.get(name) is None]
        if lacking:
            return Scaler("damaged", where, f"it has no {lacking[0]}")
        if not (isinstance(scaler["scale"], float) and 0.0 < scaler["scale"] < math.inf):
            return Scaler("damaged", where, f"its scale is {scaler['scale']!r}")
        for name in _NATIVE[1:]:
            if type(scaler[name]) is not int:
                return Scaler("damaged", where, f"its {name} is no whole number")
    states = {tuple(scaler[name] for name in _NATIVE) for scaler in part.scalers}
    part.facts["scalers_differ"] = len(states) > 1
    texts = (f"scale {a:g}, {b} good steps, hysteresis {c}" for a, b, c in sorted(states))
    return Scaler("whole", where, "; ".join(texts))


def _look_at_values(part: Part) -> None:
    masters = set(part.dtypes(MASTER))
    if masters:
        part.masters = REMAINDERS if masters == {"int16"} else UNKNOWN
    if find_spec("torch") is None:
        if part.masters == UNKNOWN:
            part.notes.append("torch is not installed here: no values were looked at")
        return
    from .values import are_numbers, narrower

    if part.masters == UNKNOWN:
        numbers = are_numbers(part, _SAMPLE)
        part.masters = UNKNOWN if numbers is None else NUMBERS if numbers else WHOLE
    part.moments = {
        name: narrower(part.held[name], _SAMPLE)
        for name in (EXP_AVG, EXP_AVG_SQ)
        if part.held.get(name)
    }
