"""Read the files that contain a checkpoint's tensors, without torch.

- torch's distributed checkpoints, including Megatron's, have ``.metadata`` and ``*.distcp`` files.
- Each rank may have files of ``torch.save``, such as ``model_world_size_N_rank_I.pt``.
- Of ``*.safetensors`` files only the headers are read.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from pathlib import Path

from precision_shim.errors import CheckpointUnreadableError
from precision_shim.files.metadata import METADATA, StoredTensor, dtype_name, read_metadata
from precision_shim.files.pickles import Made
from precision_shim.files.safetensors import read_header

from .tensors import Archive, Tensor, reading

_RANK_FILE = re.compile(r"(?P<what>\w+)_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt")
_COMMON_STATE = "common_state/shard_0_1"
"""Key of Megatron's common state in ``.metadata`` since megatron-core 0.19; earlier versions write
``common.pt`` (``load_common_state_dict`` in Megatron's ``dist_checkpointing/serialization.py``)."""


@dataclass
class Unit:
    """A directory of files that were written together.

    Attributes:
        kind: ``"megatron"``, ``"dcp"``, ``"shards"`` or ``"safetensors"``.
        path: the directory.
        tensors: the tensors, by key; in files of ranks, each rank's shards by keys of their own.
        objects: for the key of each object that is no tensor, a function that reads the object.
        common: archives of Megatron's common state (a ``.distcp`` object since megatron-core 0.19),
            or of each rank's extra state.
        world_size: number of ranks if each rank wrote files of its own.
        lacking: the kinds in ``_TOGETHER`` of which the directory has no file.
        unstepped: whether each rank's optimizer has parameter groups and no states, as a torch
            optimizer before its first step that was not skipped.
    """

    kind: str
    path: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Callable[[], Archive]] = field(default_factory=dict)
    common: list[Archive] = field(default_factory=list)
    world_size: int | None = None
    lacking: tuple[str, ...] = ()
    unstepped: bool = False


def kind_of(path: Path) -> str | None:
    """Return the kind of a directory's files, by their names; ``None`` if no known kind matches.

    Raises:
        CheckpointUnreadableError: the directory's checkpoint is incomplete.
        OSError: the directory cannot be read.
    """
    names = {entry.name for entry in path.iterdir()}
    if METADATA in names:
        return "megatron" if names & {"common.pt", "metadata.json"} else "dcp"
    if "common.pt" in names or any(name.endswith(".distcp") for name in names):
        raise CheckpointUnreadableError(
            f"{path}: it has no .metadata: saving did not end, or the file is lost. Take another "
            "checkpoint."
        )
    if any(_RANK_FILE.fullmatch(name) for name in names):
        return "shards"
    if any(name.endswith(".safetensors") for name in names):
        return "safetensors"
    return None


def read_unit(path: Path, kind: str) -> Unit:
    """Read the files of a directory.

    Raises:
        CheckpointUnreadableError: a file is damaged or missing.
    """
    unit = Unit(kind, path)
    if kind == "shards":
        _read_shards(unit)
    elif kind == "safetensors":
        _read_safetensors(unit)
    else:
        _read_distributed(unit)
    return unit


def _read_distributed(unit: Unit) -> None:
    path = unit.path / METADATA
    with reading(path):
        _take(unit, *read_metadata(path.read_bytes(), str(path)))
    common, within = unit.path / "common.pt", unit.objects.pop(_COMMON_STATE, None)
    if unit.kind == "megatron" or within is not None:
        if not (unit.path / "metadata.json").is_file():
            raise CheckpointUnreadableError(f"{unit.path / 'metadata.json'}: it is missing.")
        unit.common.append(Archive(common) if within is None else within())


def _take(unit: Unit, metadata: Made, entries: dict[str, StoredTensor]) -> None:
    places: dict[str, list[Callable[[], Archive]]] = {}
    ends: dict[Path, int] = {}
    sizes: Counter[str] = Counter()
    for index, info in (metadata.get("storage_data") or {}).items():
        relative = Path(info.get("relative_path"))
        if relative.is_absolute() or ".." in relative.parts:
            raise ValueError("a piece lies in no file of this directory")
        file, end = unit.path / relative, info.get("offset") + info.get("length")
        ends[file] = max(ends.get(file, 0), end)
        # torch.save writes archives; compressed tensors and safetensors are none.
        if not info.get("transform_descriptors") and file.suffix != ".safetensors":
            sizes[index.get("fqn")] += info.get("length")
            places.setdefault(index.get("fqn"), []).append(partial(Archive, file, end))
    for file, end in ends.items():
        with reading(file):
            size = file.stat().st_size
        if size < end:
            raise CheckpointUnreadableError(f"{file}: it has {size} bytes of {end}.")
    for key, entry in entries.items():
        there = places.get(key, ())
        if entry.dtype is not None:
            parts = tuple(partial(_first_bytes, archive) for archive in there)
            tensor = Tensor(entry.dtype, prod(entry.shape), parts)
            # A tensor that consists of others, such as 8-bit codes and scales, has fewer bytes.
            packed = parts and sizes[key] < tensor.bytes
            unit.tensors[key] = Tensor("packed", tensor.elements) if packed else tensor
        elif there:
            unit.objects[key] = there[0]


def _first_bytes(archive: Callable[[], Archive], most: int) -> bytes:
    [(_, tensor)] = archive().tensors()
    return tensor.parts[0](most)


_TOGETHER = ("model", "optim", "extra_state")
"""Kinds of files that verl and SkyRL write for each rank, unless a job's config excludes some."""


def _read_shards(unit: Unit) -> None:
    matches = [match for path in unit.path.iterdir() if (match := _RANK_FILE.fullmatch(path.name))]
    worlds = sorted({int(match["world"]) for match in matches})
    last = unit.path / "fsdp_config.json"
    if len(worlds) > 1 and last.is_file():  # an earlier job had another number of ranks
        with reading(last):
            worlds = [
                n for n in worlds if n == json.loads(last.read_bytes())["world_size"]
            ] or worlds
        matches = [match for match in matches if int(match["world"]) in worlds]
    if len(worlds) > 1:
        raise CheckpointUnreadableError(
            f"{unit.path}: it has files of jobs of {' and '.join(map(str, worlds))} ranks."
        )
    [unit.world_size] = worlds
    kinds = sorted({match["what"] for match in matches})
    unit.lacking = tuple(kind for kind in _TOGETHER if kind not in kinds)
    unit.unstepped = "optim" in kinds
    for what, rank in product(
        {*kinds} & {*_TOGETHER}, range(min(unit.world_size, len(matches) + 1))
    ):
        archive = Archive(unit.path / f"{what}_world_size_{unit.world_size}_rank_{rank}.pt")
        if what == "extra_state":
            unit.common.append(archive)
        else:
            if what == "optim":
                groups = isinstance(archive.tree, dict) and archive.tree.get("param_groups")
                unit.unstepped &= bool(groups) and archive.tree.get("state") == {}
            for keys, tensor in archive.tensors():
                key = ".".join(map(str, (what, rank, *keys)))
                unit.tensors[key] = Tensor("packed", 0) if key in unit.tensors else tensor


_WORDS = {"f": "float", "i": "int", "u": "uint"}


def _read_safetensors(unit: Unit) -> None:
    for path in sorted(unit.path.glob("*.safetensors")):
        with reading(path):
            header, begin = read_header(path)
            for name, entry in header.items():
                if begin + entry["data_offsets"][1] > path.stat().st_size:
                    raise ValueError("it ends before its tensors do")
                dtype = entry["dtype"].lower()  # "F32" is torch's "float32"
                dtype = re.sub(r"^[fiu](?=\d+$)", lambda match: _WORDS[match[0]], dtype)
                elements = prod(int(size) for size in entry["shape"])
                unit.tensors[name] = Tensor(dtype_name(dtype), elements)
