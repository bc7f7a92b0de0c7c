"""Save the scaler's record as a tensor in a checkpoint's ``train_state``, and restore it.

torch's distributed checkpoint unpickles every value that is not a tensor. A load fails if the
checkpoint lacks a key of the trainer's state. The shim therefore first reads the checkpoint's
metadata, with a pickle reader that imports and calls nothing. Each rank writes a file of its own,
and adds the record under a key of its own, so that a load tells files of different saves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from precision_shim.adapting import Call, holding, seam
from precision_shim.adapting.scaling import METADATA, SaveAside, raise_together, read_metadata
from precision_shim.errors import CheckpointUnreadableError, ScalerCheckpointError

from ..torch_fp16 import ScaledTraining
from .training.trainers import BOTH, SCALED, of_both

KEY = "precision_shim_scaler"
"""Key of the scaler's record in a trainer's state."""

STATE = "train_state"
"""Key of a trainer's state in torchtitan's checkpoint."""

_ANOTHER = "Take another checkpoint."
_OTHERWISE = (
    f"Or load this one with {STATE} among checkpoint.exclude_from_loading, to continue with a "
    "fresh scaler."
)


_loading: ContextVar[tuple[str, Mapping[str, tuple[int, ...]]] | None] = ContextVar(
    "precision_shim_torchtitan_load", default=None
)
"""The place of the scaler's record in the checkpoint being loaded, and records' sizes by key."""

_saving: ContextVar[str] = ContextVar("precision_shim_torchtitan_save", default="")
"""The name of the save that is going on."""


@seam(
    "torchtitan.components.checkpointer.dcp:CheckpointManager.dcp_save",
    at=BOTH,
    why="the one place that all ranks call once for a save",
    relies_on=("dcp", "async_save"),
    **SCALED,
)
def save(call: Call, state_dict: Any) -> Any:
    """Save a checkpoint, with a record in the file of each rank."""
    if ScaledTraining.of(state_dict.get(STATE)) is None:
        return call.proceed()
    with holding(_saving, SaveAside({}).name):
        return call.proceed()


@seam(
    "torchtitan.components.checkpointer.dcp:CheckpointManager.dcp_load",
    at=BOTH,
    why="the one place that knows the checkpoint that is loaded",
    relies_on=("states",),
    **SCALED,
)
def load(call: Call, state_dict: Any, checkpoint_id: Any, from_hf: Any) -> Any:
    """Load a checkpoint, with the scaler's record if the checkpoint has one."""
    trainer = None if from_hf else state_dict.get(STATE)
    if ScaledTraining.of(trainer) is None:  # the trainer has no scaler, or only the model is loaded
        return call.proceed()
    where = f"{checkpoint_id} ({STATE}.{KEY})"
    sizes, problem = {}, ""
    try:
        sizes = _sizes_of_records(str(checkpoint_id), where)
    except ScalerCheckpointError as error:
        problem = str(error)
    raise_together(problem)
    with holding(_loading, (where, sizes)):
        return call.proceed()


def _sizes_of_records(checkpoint: str, where: str) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the record, and of this rank's share of all ranks' records, by key."""
    file_name = os.path.join(checkpoint, METADATA)
    try:
        with _open_metadata(checkpoint) as file:
            entries = read_metadata(file, file_name)[1]
    except CheckpointUnreadableError as error:
        raise ScalerCheckpointError(
            f"{error} Whether it has a loss scaler's state cannot be told. {_ANOTHER}"
        ) from None
    except Exception as error:  # remote file systems raise their own errors
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise ScalerCheckpointError(
            f"{file_name}: it cannot be read ({why}). Whether the checkpoint has a loss scaler's "
            f"state cannot be told. {_ANOTHER}"
        ) from error
    rank, ranks = dist.get_rank(), dist.get_world_size()
    keys = sorted(key for key in entries if key.startswith(f"{STATE}.{KEY}"))
    sizes = {}
    for key in {*keys[:1], *keys[rank::ranks]}:
        entry = entries[key]
        if entry.dtype != "uint8":
            what = "an object" if entry.dtype is None else f"a tensor of {entry.dtype}"
            raise ScalerCheckpointError(
                f"{where}: it is {what} where a tensor of bytes was expected: it is damaged, and "
                f"not read. {_ANOTHER} {_OTHERWISE}"
            )
        sizes[key.removeprefix(f"{STATE}.")] = entry.shape
    return sizes


def _open_metadata(checkpoint: str) -> Any:
    if "://" not in checkpoint:
        return open(os.path.join(checkpoint, METADATA), "rb")
    from torch.distributed.checkpoint._storage_utils import _storage_setup

    reader: Any = _storage_setup(None, checkpoint, reader=True)
    return reader.fs.create_stream(reader.fs.concat_path(reader.path, METADATA), "rb")


@seam(
    at=of_both("state_dict"), why="what goes into a checkpoint, and what is asked of one", **SCALED
)
def state_dict(call: Call) -> Any:
    """Add the scaler's record to the trainer's state; during a load, add a placeholder of zeros."""
    state = call.proceed()
    training = ScaledTraining.of(call.instance)
    if training is None:
        return state
    loading = _loading.get()
    if loading is not None:
        return {
            **state,
            **{key: torch.zeros(size, dtype=torch.uint8) for key, size in loading[1].items()},
        }
    name = _saving.get()
    keys = (KEY, f"{KEY}_{dist.get_rank()}") if name and dist.get_world_size() > 1 else (KEY,)
    return {**state, **dict.fromkeys(keys, training.record_tensor(name))}


@seam(at=of_both("load_state_dict"), why="what comes from a checkpoint", **SCALED)
def load_state_dict(call: Call, state_dict: Any) -> Any:
    """Load the trainer's state, and restore the scaler from its record."""
    training = ScaledTraining.of(call.instance)
    if training is None:
        return call.proceed()
    rest = {key: value for key, value in state_dict.items() if not key.startswith(KEY)}
    records = [state_dict[key] for key in sorted(state_dict.keys() - rest.keys())]
    call.arguments["state_dict"] = rest
    result = call.proceed()
    where, _ = _loading.get() or (f"{STATE}.{KEY}", None)
    training.restore_record(records, where, _OTHERWISE)
    return result
