"""Find what no rule of the doctor covers in a checkpoint: states, copies of weights, and files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from precision_shim_adapters.common.megatron_keys import is_optimizers

from .layout import FLOATS, MOMENTS, CheckpointPart
from .tensors import Archive
from .units import Unit

_TRAINERS = re.compile(r"^(dataloader|lr_scheduler|rng_state|sched)|_extra_state")
"""Matches keys of objects in which a trainer or a layer keeps no weights."""
_OPTIMIZERS = ("optim", "optimizer", "optimizers")
_STATES = re.compile(
    r"\.(exp_avg|exp_avg_sq|param|fp32_param|master_param|master_weight|step)(\.|$)"
    r"|\.(param_groups|param_state_sharding_type)\b|\.state$|\b(lr_)?sched(uler)?\."
    r"|\.(optimizer|grad_scaler|param_state|per_bucket_numel(_unpadded)?)/shard|precision_shim_scaler"
)
"""Matches an optimizer's keys that are covered."""
_NAME = re.compile(r"\.(?:state|bucket_idx_\d+)\.(\w+)")
"""Matches the name of a state in Megatron's keys; torch's keys end with the name."""

_READ = {
    "megatron": r".+\.distcp|common\.pt",
    "dcp": r".+\.distcp",
    "shards": r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt",
}
"""Names of the files that ``units`` reads, by the kind of the directory."""
_WEIGHTS = r"((shard-\d+-|adapter_|pytorch_)?model|consolidated)([-.]\w+)*\.(safetensors|bin)"
_WEIGHTS_IN = ("huggingface", "hf", "adapter", "lora_adapter", "consolidated")
"""Names of weights in Hugging Face's format, and of directories in which frameworks save them."""
_KNOWN = {
    "texts": r"[^/]+\.(jsonl?|txt|ya?ml|toml|csv|log|md|jinja|py)|events\.out\.[^/]+",
    "tokenizer": r"(tokenizer|sentencepiece|spiece|vocab)[^/]*\.(model|bpe|tiktoken)",
    "data loader": r"(data(_\d+)?|(train_)?dataloader[^/]*|global_dataset_\w+)\.(pt|pkl)",
    "random numbers": r"rng(_[^/]+)?\.(pt|pth)",
    "schedule, counters": r"((lr_)?scheduler|(latest_)?train(er)?_state|training_args)\.(pt|bin)",
    "rollout's samples": r"fully_async_state\.pt|replay_buffer\.pt|transfer_queue/.+",
}
"""Names of files with neither weights nor optimizer states, by what the files contain."""


def is_state(unit: Unit, key: str) -> bool:
    """Whether a key of a unit belongs to an optimizer."""
    return is_optimizers(key) or not {key.partition(".")[0], unit.path.name}.isdisjoint(_OPTIMIZERS)


def find_unknown(part: CheckpointPart, top: Path, apart: Collection[Path]) -> None:
    """Add what is unknown, and the kinds of files that are not read, to a ``CheckpointPart``.

    Args:
        part: the model; its tensors are already sorted.
        top: the directory that was searched.
        apart: directories within ``top`` that belong to other models.
    """
    weights: dict[str, Path] = {}
    found: list[str] = []
    for unit in part.units:
        for key in (*unit.tensors, *unit.objects):
            if is_state(unit, key):
                match = _NAME.search(key) if unit.kind == "megatron" else None
                if not _STATES.search(key):
                    found.append(f"the optimizer state {match[1] if match else key.split('.')[-1]}")
            elif key in unit.tensors:
                name = key.split(".", 2)[2] if unit.kind == "shards" else key  # "model.0.weight"
                if weights.setdefault(name, unit.path) != unit.path:
                    found.append(f"the copy of weights {unit.path.name}")
            elif not _TRAINERS.search(key):
                found += _tensors_in(unit.objects[key](), key)
        for archive in unit.common:
            found += _tensors_in(archive, "")
    found += (f"the copy of weights {root}" for root in _find_copies(weights))
    dtypes = {dtype for name in MOMENTS for dtype in part.dtypes(name)}
    found += (f"moments in {dtype}" for dtype in dtypes - {*FLOATS})
    first, second = (sum(part.dtypes(name).values()) for name in MOMENTS)
    if first != second or (part.held.get("master") and not first):
        found.append(f"an optimizer with {first} values of exp_avg and {second} of exp_avg_sq")
    part.unknown |= dict.fromkeys(found, True)
    unread = dict(_find_unread(part, top, apart))
    if kinds := sorted({*unread.values()} - {""}):
        part.notes.append(f"not read: {', '.join(kinds)}")
    part.unknown |= {f"the file {file}": False for file, kind in unread.items() if not kind}


def _find_copies(names: Collection[str]) -> Iterator[str]:
    """Yield first words of keys that all have a twin without this word, such as ``ema``."""
    roots: dict[str, bool] = {}
    for name in names:
        root, *words = name.split(".")
        ends = [".".join(words[start:]) for start in range(len(words))]
        twins = {*ends, *(f"model.{end}" for end in ends)} - {name}
        roots[root] = roots.get(root, root != "model") and not twins.isdisjoint(names)
    return (root for root, copied in roots.items() if copied)


def _tensors_in(archive: Archive, name: str) -> Iterator[str]:
    """Yield the names of floating-point tensors of more than one element."""
    for keys, tensor in archive.tensors():
        if tensor.dtype in FLOATS and tensor.elements > 1:
            yield ".".join(word for word in (name, *map(str, keys)) if word)


def _find_unread(
    part: CheckpointPart, top: Path, apart: Collection[Path]
) -> Iterator[tuple[Path, str]]:
    """Yield each file that was not read, with its kind; the kind is empty if it is not known."""
    files: dict[Path, Path] = {}
    for root in (
        top,
        *part.read,
    ):  # walk() enters no link, and a directory that was read may be one
        for place, below, names in os.walk(root):
            below[:] = [name for name in below if Path(place, name) not in apart]
            files |= {Path(place).resolve() / name: Path(place, name) for name in names}
    read = {path.resolve(): kind for path, kind in part.read.items()}
    for real, file in sorted(files.items()):
        path, kind = file.relative_to(top), read.get(real.parent, "")
        hidden = any(word.startswith(".") for word in path.parts)
        if hidden or real in read or re.fullmatch(_READ.get(kind, ""), file.name):
            continue
        near = kind or file.parent == top or file.parent.name in _WEIGHTS_IN
        if near and re.fullmatch(_WEIGHTS, file.name):
            if kind != "safetensors":
                yield path, "weights for Hugging Face"
        else:
            fits = (k for k, name in _KNOWN.items() if re.search(f"(^|/)({name})$", str(path)))
            yield path, next(fits, "")
