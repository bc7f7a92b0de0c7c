"""Read the files that contain a checkpoint's tensors, without torch.

- torch's distributed checkpoints, including Megatron's, have ``.metadata`` and ``*.distcp`` files.
- Each rank may have files of ``torch.save``, such as ``model_world_size_N_rank_I.pt``.
- Of ``*.safetensors`` files only the headers are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

from ..errors import CheckpointUnreadableError
from .metadata import NAME, dtype_name, entries_of, read_metadata
from .pickles import Made
from .safetensors import read_header
from .tensors import Archive, Tensor, reading

__all__ = ["DCP", "MEGATRON", "SAFETENSORS", "SHARDS", "Unit", "kind_of", "read_unit"]

MEGATRON, DCP, SHARDS, SAFETENSORS = "megatron", "dcp", "shards", "safetensors"

_RANK_FILE = re.compile(r"(?P<what>\w+)_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt")
_COMMON_STATE = "common_state/shard_0_1"
"""Key of Megatron's common state in ``.metadata`` since megatron-core 0.19; earlier versions write
``common.pt`` (``load_common_state_dict`` in Megatron's ``dist_checkpointing/serialization.py``)."""

_HARMLESS = re.compile(
    r"torch\.(Size|device|bool|b?float\d+\w*|u?int\d+|complex\d+|strided)"
    r"|torch\.serialization\._get_layout|torch\.distributed\.checkpoint\."
    r"(metadata|filesystem|planner|storage|\w*hf_\w+|_fsspec_filesystem)\._?[A-Z]\w*"
    r"|collections\.OrderedDict|(builtins|__builtin__)\.(set|frozenset|tuple|list|bytes|bytearray)"
    r"|_codecs\.encode|pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path"
    r"|megatron\.core\.dist_checkpointing\.(mapping|strategies\.\w+)\._?[A-Z]\w*"
)
"""The names that a distributed checkpoint's metadata may have. Whole names are compared, because
other names within torch and pathlib give access to ``os.system``."""


@dataclass
class Unit:
    """A directory of files that were written together.

    Attributes:
        kind: ``MEGATRON``, ``DCP``, ``SHARDS`` or ``SAFETENSORS``.
        path: the directory.
        tensors: the tensors, by key, each with the shards of all ranks.
        objects: maps the key of each object that is no tensor to a function that reads the object
            as plain data (see the module ``pickles``).
        common: archives of Megatron's common state (``common.pt``; with megatron-core 0.19 and
            later an object in the ``.distcp`` files), or of each rank's extra state.
        world_size: number of ranks if each rank wrote files of its own; otherwise ``None``.
        lacking: the kinds in ``_TOGETHER`` of which the directory has no file.
    """

    kind: str
    path: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Callable[[], Archive]] = field(default_factory=dict)
    common: list[Archive] = field(default_factory=list)
    world_size: int | None = None
    lacking: tuple[str, ...] = ()


def kind_of(path: Path) -> str | None:
    """Return the kind of a directory's files, by their names; ``None`` if no known kind matches.

    Raises:
        CheckpointUnreadableError: the directory's checkpoint is incomplete.
        OSError: the directory cannot be read.
    """
    names = {entry.name for entry in path.iterdir()}
    if NAME in names:
        return MEGATRON if names & {"common.pt", "metadata.json"} else DCP
    if "common.pt" in names or any(name.endswith(".distcp") for name in names):
        raise CheckpointUnreadableError(
            f"{path}: it has no .metadata: saving did not end, or the file is lost."
        )
    if any(_RANK_FILE.fullmatch(name) for name in names):
        return SHARDS
    if any(name.endswith(".safetensors") for name in names):
        return SAFETENSORS
    return None


def read_unit(path: Path, kind: str) -> Unit:
    """Read the files of a directory.

    Raises:
        CheckpointUnreadableError: a file is damaged or missing.
    """
    unit = Unit(kind, path)
    if kind == SHARDS:
        _read_shards(unit)
    elif kind == SAFETENSORS:
        _read_safetensors(unit)
    else:
        _read_distributed(unit)
    return unit


def _read_distributed(unit: Unit) -> None:
    path = unit.path / NAME
    named: set[str] = set()
    with reading(path), path.open("rb") as file:
        metadata = read_metadata(file, str(path), named)
    foreign = sorted(name for name in named if not _HARMLESS.fullmatch(name))
    if foreign:
        raise CheckpointUnreadableError(
            f"{path}: it would import {', '.join(foreign[:3])}, which no metadata of torch's does; "
            "do not load it."
        )
    with reading(path):
        _take(unit, metadata)
    common, within = unit.path / "common.pt", unit.objects.pop(_COMMON_STATE, None)
    ours = unit.kind == MEGATRON or any(name.startswith("megatron.core.") for name in named)
    if ours or within is not None:
        unit.kind = MEGATRON
        if not (unit.path / "metadata.json").is_file():
            raise CheckpointUnreadableError(f"{unit.path / 'metadata.json'}: it is missing.")
        unit.common.append(Archive(common) if within is None else within())


def _take(unit: Unit, metadata: Made) -> None:
    places: dict[str, list[tuple[Path, int, bool]]] = {}
    ends: dict[Path, int] = {}
    for index, info in (metadata.get("storage_data") or {}).items():
        relative = Path(info.get("relative_path"))
        if relative.is_absolute() or ".." in relative.parts:
            raise ValueError("a piece lies in no file of this directory")
        file, end = unit.path / relative, info.get("offset") + info.get("length")
        # torch.save writes archives; compressed tensors and safetensors are none.
        archive = not info.get("transform_descriptors") and file.suffix != ".safetensors"
        places.setdefault(index.get("fqn"), []).append((file, end, archive))
        ends[file] = max(ends.get(file, 0), end)
    for file, end in ends.items():
        with reading(file):
            size = file.stat().st_size
        if size < end:
            raise CheckpointUnreadableError(f"{file}: it has {size} bytes of {end}.")
    for key, entry in entries_of(metadata, str(unit.path / NAME)).items():
        there = places.get(key, [])
        if entry.dtype is not None:
            parts = tuple(partial(_first_bytes, *at) for *at, archive in there if archive)
            unit.tensors[key] = Tensor(key, entry.dtype, prod(entry.shape), parts)
        elif there:
            unit.objects[key] = partial(Archive, *there[0][:2])


def _first_bytes(path: Path, end: int, most: int) -> bytes:
    [(_, tensor)] = Archive(path, end).tensors()
    return tensor.parts[0](most)


_TOGETHER = ("model", "optim", "extra_state")
"""Kinds of files that verl and SkyRL write for each rank, unless a job's config excludes some."""


def _read_shards(unit: Unit) -> None:
    files: dict[str, dict[int, Path]] = {}
    worlds: set[int] = set()
    for path in sorted(unit.path.iterdir()):
        match = _RANK_FILE.fullmatch(path.name)
        if match:
            worlds.add(int(match["world"]))
            files.setdefault(match["what"], {})[int(match["rank"])] = path
    if len(worlds) > 1:
        raise CheckpointUnreadableError(
            f"{unit.path}: it has files of jobs of {' and '.join(map(str, sorted(worlds)))} ranks."
        )
    [unit.world_size] = worlds
    for what, by_rank in files.items():
        lacking = next((rank for rank in range(unit.world_size) if rank not in by_rank), None)
        if lacking is not None:
            raise CheckpointUnreadableError(
                f"{unit.path}: {what}_world_size_{unit.world_size}_rank_{lacking}.pt is missing."
            )
    unit.lacking = tuple(kind for kind in _TOGETHER if kind not in files)
    for what, by_rank in sorted(files.items()):
        for _, path in sorted(by_rank.items()):
            archive = Archive(path)
            if what == "extra_state":
                unit.common.append(archive)
                continue
            for keys, tensor in archive.tensors():
                name = ".".join(map(str, (what, *keys)))
                # Each rank has a shard of the same tensor.
                known = unit.tensors.get(name, Tensor(name, tensor.dtype, 0))
                elements, parts = known.elements + tensor.elements, known.parts + tensor.parts
                unit.tensors[name] = Tensor(name, tensor.dtype, elements, parts)


_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}
"""Maps a safetensors dtype to torch's name of the dtype, both without the number of bits."""


def _read_safetensors(unit: Unit) -> None:
    for path in sorted(unit.path.glob("*.safetensors")):
        with reading(path):
            header, begin = read_header(path)
            for name, entry in header.items():
                if begin + entry["data_offsets"][1] > path.stat().st_size:
                    raise ValueError("it ends before its tensors do")
                match = re.fullmatch(r"(B?F|I|U)(\d+)", entry["dtype"])
                dtype = f"{_KINDS[match[1]]}{match[2]}" if match else entry["dtype"].lower()
                elements = prod(int(size) for size in entry["shape"])
                unit.tensors[name] = Tensor(name, dtype_name(dtype), elements)
