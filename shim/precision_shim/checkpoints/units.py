"""Read the files that contain a checkpoint's tensors, without torch.

- torch's distributed checkpoints, including Megatron's, have ``.metadata`` and ``*.distcp`` files.
- Each rank may have files of ``torch.save``, such as ``model_world_size_N_rank_I.pt``.
- Of ``*.safetensors`` files only the headers are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..errors import CheckpointUnreadableError
from ..precision.names import SIZES
from .pickles import Made, Name, read_pickle
from .safetensors import read_header
from .tensors import Archive, Tensor, count_of, dtype_name

__all__ = ["DCP", "MEGATRON", "SAFETENSORS", "SHARDS", "Unit", "kind_of", "read_unit"]

MEGATRON, DCP, SHARDS, SAFETENSORS = "megatron", "dcp", "shards", "safetensors"

_RANK_FILE = re.compile(r"(?P<what>\w+)_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt")
_COMMON_STATE = "common_state/shard_0_1"
"""Key of Megatron's common state in ``.metadata`` since megatron-core 0.19; earlier versions write
``common.pt`` (``load_common_state_dict`` in Megatron's ``dist_checkpointing/serialization.py``)."""

_METADATA = "torch.distributed.checkpoint.metadata"
_HARMLESS = re.compile(
    r"torch\.(Size|device|serialization\._get_layout)"
    r"|torch\.distributed\.checkpoint\."
    r"(metadata|filesystem|planner|storage|\w*hf_\w+|_fsspec_filesystem)\._?[A-Z]\w*"
    r"|collections\.OrderedDict|(builtins|__builtin__)\.(set|frozenset|tuple|list|bytes|bytearray)"
    r"|_codecs\.encode|pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path"
    r"|megatron\.core\.dist_checkpointing\.(mapping|strategies\.\w+)\._?[A-Z]\w*"
)
"""The callables that a distributed checkpoint's metadata may name. Whole names are compared,
because other names within torch and pathlib give access to ``os.system``."""


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
        archives: file, offset and length of each archive of ``torch.save``; a length of ``None``
            means the rest of the file.
        lacking: the kinds in ``_TOGETHER`` of which the directory has no file.
    """

    kind: str
    path: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Callable[[], Archive]] = field(default_factory=dict)
    common: list[Archive] = field(default_factory=list)
    world_size: int | None = None
    archives: list[tuple[Path, int, int | None]] = field(default_factory=list)
    lacking: tuple[str, ...] = ()


def kind_of(path: Path) -> str | None:
    """Return the kind of a directory's files, by their names; ``None`` if no known kind matches.

    Raises:
        CheckpointUnreadableError: the directory's checkpoint is incomplete.
        OSError: the directory cannot be read.
    """
    names = {entry.name for entry in path.iterdir()}
    if ".metadata" in names:
        return MEGATRON if names & {"common.pt", "metadata.json"} else DCP
    if any(name.endswith(".distcp") for name in names):
        raise CheckpointUnreadableError(
            f"{path}: it has .distcp files and no .metadata: saving did not end, or it is lost."
        )
    if names & {"common.pt"}:
        raise CheckpointUnreadableError(
            f"{path}: it has common.pt and no .metadata: saving did not end, or the file is lost."
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
    readers = {
        MEGATRON: _read_distributed,
        DCP: _read_distributed,
        SHARDS: _read_shards,
        SAFETENSORS: _read_safetensors,
    }
    unit = Unit(kind, path)
    try:
        readers[kind](unit)
    except OSError as error:
        raise CheckpointUnreadableError(
            f"{error.filename or path}: it cannot be read ({error.strerror or error})."
        ) from None
    return unit


def _read_distributed(unit: Unit) -> None:
    path = unit.path / ".metadata"
    called: set[str] = set()
    with path.open("rb") as file:
        metadata = read_pickle(file, str(path), called)
    if not isinstance(metadata, Made) or metadata.kind != f"{_METADATA}.Metadata":
        raise CheckpointUnreadableError(
            f"{path}: a pickle, but not the metadata of a distributed checkpoint."
        )
    foreign = sorted(name for name in called if not _HARMLESS.fullmatch(name))
    if foreign:
        raise CheckpointUnreadableError(
            f"{path}: it would call {', '.join(foreign[:3])}, which no metadata of torch's does; "
            "do not load it."
        )
    try:
        _take(unit, metadata)
    except CheckpointUnreadableError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointUnreadableError(
            f"{path}: the metadata of a distributed checkpoint in a form that is not known "
            f"({type(error).__name__}: {error})."
        ) from None
    common, within = unit.path / "common.pt", unit.objects.pop(_COMMON_STATE, None)
    config = unit.path / "metadata.json"
    if unit.kind == MEGATRON or within is not None or _is_megatrons(called):
        _check_config(config)
        unit.kind = MEGATRON
    if common.exists():
        unit.common.append(Archive(common))
        unit.archives.append((common, 0, None))
    elif within is not None:
        unit.common.append(within())
    elif unit.kind == MEGATRON:
        raise CheckpointUnreadableError(f"{common}: it is missing.")


def _is_megatrons(called: set[str]) -> bool:
    return any(name.startswith("megatron.core.") for name in called)


_WRITTEN = {"sharded_backend": ("torch_dist",), "common_backend": ("torch",)}


def _check_config(path: Path) -> None:
    """Check ``metadata.json``, which Megatron requires in a checkpoint's directory."""
    try:
        config = dict(json.loads(path.read_bytes()))
        written = {name: config[name] for name in _WRITTEN if name in config}
    except FileNotFoundError:
        raise CheckpointUnreadableError(f"{path}: it is missing.") from None
    except (ValueError, TypeError, RecursionError):
        raise CheckpointUnreadableError(f"{path}: it is no JSON object.") from None
    known = {*_WRITTEN, *(f"{name}_version" for name in _WRITTEN)}
    wrong = [name for name, value in written.items() if value not in _WRITTEN[name]]
    wrong += [name for name in config if name not in known]
    wrong += [name for name in known - {*_WRITTEN} if type(config.get(name, 1)) is not int]
    if "sharded_backend" not in config:
        wrong.append("sharded_backend")
    if wrong:
        raise CheckpointUnreadableError(
            f"{path}: {str(wrong[0])[:40]!r} in it is not as Megatron's torch_dist writes it."
        )


def _take(unit: Unit, metadata: Made) -> None:
    places: dict[str, list[_Place]] = {}
    ends: dict[Path, int] = {}
    for index, info in (metadata.get("storage_data") or {}).items():
        relative = info.get("relative_path")
        inside = isinstance(relative, str) and not Path(relative).is_absolute()
        if not inside or ".." in Path(relative).parts:
            raise ValueError("a piece lies in no file of this directory")
        file = unit.path / relative
        place = _Place(
            file,
            int(info.get("offset")),
            int(info.get("length")),
            bool(info.get("transform_descriptors")),
        )
        places.setdefault(index.get("fqn"), []).append(place)
        if place.is_archive:
            unit.archives.append((file, place.offset, place.length))
        ends[file] = max(ends.get(file, 0), place.offset + place.length)
    for file, end in ends.items():
        size = file.stat().st_size if file.is_file() else None
        if size is None or size < end:
            fault = "is missing" if size is None else f"has {size} bytes of {end}"
            raise CheckpointUnreadableError(f"{file}: it {fault}.")
    for key, described in metadata.get("state_dict_metadata").items():
        there = places.get(key, [])
        if described.kind == f"{_METADATA}.TensorStorageMetadata":
            properties = described.get("properties")
            state = properties.state
            dtype = state[0] if isinstance(state, tuple) else state["dtype"]
            size = described.get("size")
            if not isinstance(dtype, Name) or not isinstance(size, tuple):
                raise ValueError(f"{key} has no dtype or size")
            unit.tensors[key] = Tensor(key, dtype_name(dtype.path), count_of(size), tuple(there))
        elif there:
            unit.objects[key] = there[0].archive


@dataclass(frozen=True)
class _Place:
    """The bytes of a file that contain a piece of a tensor, or an object."""

    path: Path
    offset: int
    length: int
    transformed: bool

    @property
    def is_archive(self) -> bool:
        # ``torch.save`` writes archives; compressed tensors and safetensors are none.
        return not self.transformed and self.path.suffix != ".safetensors"

    def archive(self) -> Archive:
        return Archive(self.path, self.offset, self.length)

    def __call__(self, most: int) -> bytes:
        if not self.is_archive:
            return b""
        tensors = [tensor for _, tensor in self.archive().tensors()]
        return tensors[0].parts[0](most) if len(tensors) == 1 and tensors[0].parts else b""


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
    (unit.world_size,) = worlds
    for what, by_rank in files.items():
        # A file's name may claim any number of ranks: do not build a list with an item per rank.
        lacking = next((rank for rank in range(unit.world_size) if rank not in by_rank), None)
        if lacking is not None:
            raise CheckpointUnreadableError(
                f"{unit.path}: {what}_world_size_{unit.world_size}_rank_{lacking}.pt is missing."
            )
    unit.lacking = tuple(kind for kind in _TOGETHER if kind not in files)
    for what, by_rank in sorted(files.items()):
        for _, path in sorted(by_rank.items()):
            archive = Archive(path)
            unit.archives.append((path, 0, None))
            if what == "extra_state":
                unit.common.append(archive)
                continue
            for keys, tensor in archive.tensors():
                name = ".".join(map(str, (what, *keys)))
                # Each rank has a shard of the same tensor.
                elements, parts = tensor.elements, tensor.parts
                known = unit.tensors.get(name)
                if known is not None:
                    elements, parts = known.elements + elements, known.parts + parts
                unit.tensors[name] = Tensor(name, tensor.dtype, elements, parts)


_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}
"""Maps a safetensors dtype to torch's name of the dtype, both without the number of bits."""

_OF_SEVERAL = re.compile(r"(?P<before>.*?)(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


def _read_safetensors(unit: Unit) -> None:
    there = {path.name: path for path in sorted(unit.path.glob("*.safetensors"))}
    for path in there.values():
        unit.tensors.update(_read_header(path))
    wanted = _read_index(unit.path / "model.safetensors.index.json")
    for name in there:
        match = _OF_SEVERAL.fullmatch(name)
        if match and "shard-" not in match["before"]:  # each rank writes "shard-" files of its own
            count = int(match["count"])
            wanted |= {
                f"{match['before']}{number:05}-of-{count:05}.safetensors"
                for number in range(1, min(count, len(there) + 1) + 1)
            }
    lacking = sorted(wanted - there.keys())
    if lacking:
        raise CheckpointUnreadableError(f"{unit.path / lacking[0]}: it is missing.")


def _read_index(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    try:
        return set(json.loads(path.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointUnreadableError(f"{path}: no whole index of safetensors files.") from None


def _read_header(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size
    try:
        header, begin = read_header(path)
        tensors, spans = {}, []
        for name, entry in header.items():
            code, (start, stop) = str(entry["dtype"]), entry["data_offsets"]
            match = re.fullmatch(r"(B?F|I|U)(\d+)", code)
            dtype = dtype_name(f"{_KINDS[match[1]]}{match[2]}" if match else code.lower())
            if not 0 <= start <= stop:
                raise ValueError(f"{name} ends before it begins")
            at = partial(_read_range, path, begin + start, stop - start)
            tensors[name] = Tensor(name, dtype, count_of(entry["shape"]), (at,))
            if stop - start < tensors[name].bytes and dtype in SIZES:
                raise ValueError(f"{name} has {stop - start} bytes of {tensors[name].bytes}")
            spans.append((start, stop))
        end = 0
        for start, stop in sorted(spans):
            if start != end:
                raise ValueError(f"nothing says what its bytes {end} to {start} are")
            end = stop
        if begin + end != size:
            raise ValueError(f"it has {size} bytes of {begin + end}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointUnreadableError(f"{path}: no whole safetensors file ({error}).") from None
    return tensors


def _read_range(path: Path, start: int, size: int, most: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(min(most, size))
