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

__all__ = ["AROUND", "find_unknown", "is_state"]

AROUND = ("dataloader", "lr_scheduler", "rng_state")
"""Beginnings of the keys of a trainer's data loader, schedule and random numbers."""

_OPTIMIZERS = ("optim", "optimizer", "optimizers")
_STATES = re.compile(
    r"\.(exp_avg|exp_avg_sq|param|fp32_param|master_param|master_weight|step)(\.|$)"
    r"|\.(param_groups|param_state_sharding_type)\b|\b(lr_)?sched(uler)?\."
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
    "texts": r".+\.(jsonl?|txt|ya?ml|toml|csv|log|md|jinja|py)|events\.out\.tfevents\..+",
    "tokenizer": r"(tokenizer|sentencepiece|spiece|vocab).*\.(model|bpe|tiktoken)",
    "data loader": r"(data(_\d+)?|(train_)?dataloader.*|global_dataset_state_dict_\d+)\.(pt|pkl)",
    "random numbers": r"rng(_\w+)?\.(pt|pth)",
    "learning rate schedule": r"(lr_)?scheduler\.pt",
    "trainer's counters": r"trainer_state\.pt|(latest_)?train_state\.pt|training_args\.bin",
    "rollout's samples": r"fully_async_state\.pt|replay_buffer\.pt",
}
"""Names of files with neither weights nor optimizer states, by what the files contain."""


def is_state(unit: Unit, key: str) -> bool:
    """Whether a key of a unit belongs to an optimizer."""
    names = (key.partition(".")[0], unit.path.name)
    return is_optimizers(key) or any(name in _OPTIMIZERS for name in names)


def find_unknown(part: CheckpointPart, top: Path, apart: Collection[Path]) -> None:
    """Add what is unknown, and the kinds of files that are not read, to a ``CheckpointPart``.

    Args:
        part: the model; its tensors are already sorted.
        top: the directory that was searched.
        apart: directories within ``top`` that belong to other models.
    """
    names: set[str] = set()
    for unit in part.units:
        keys = (*unit.tensors, *unit.objects)
        for key in (key for key in keys if is_state(unit, key) and not _STATES.search(key)):
            match = _NAME.search(key) if unit.kind == "megatron" else None
            part.unknown.add(f"the optimizer state {match[1] if match else key.split('.')[-1]}")
        for archive in unit.common:
            part.unknown |= set(_tensors_in(archive, ""))
        for key, read in unit.objects.items():
            if not is_state(unit, key) and "_extra_state" not in key and not key.startswith(AROUND):
                part.unknown |= set(_tensors_in(read(), key))
        # "model.0.weight" is a shard of rank 0
        start = 2 if unit.kind == "shards" else 0
        weights = {".".join(k.split(".")[start:]) for k in unit.tensors if not is_state(unit, k)}
        if weights & names:
            part.unknown.add(f"the copy of weights {unit.path.name}")
        names |= weights
    part.unknown |= {f"the copy of weights {root}" for root in _find_copies(names)}
    for name in MOMENTS:
        part.unknown |= {f"{name} in {dtype}" for dtype in part.dtypes(name).keys() - {*FLOATS}}
    first, second = (sum(part.dtypes(name).values()) for name in MOMENTS)
    if first != second or (part.held.get("master") and not first):
        part.unknown.add(
            f"an optimizer with exp_avg for {first} and exp_avg_sq for {second} values"
        )
    for file, kind in _find_unread(part, top, apart):
        (part.unread if kind else part.unknown).add(kind or f"the file {file}")


def _find_copies(names: Collection[str]) -> Iterator[str]:
    """Yield first words of keys that all have a twin without this word, such as ``ema``."""
    roots: dict[str, bool] = {}
    for name in names:
        root, *words = name.split(".")
        ends = {".".join(words[start:]) for start in range(len(words))}
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
        elif path.parts[0] == "transfer_queue":  # verl's asynchronous trainers
            yield path, "rollout's samples"
        else:
            fits = (kind for kind, name in _KNOWN.items() if re.fullmatch(name, file.name))
            yield path, next(fits, "")
