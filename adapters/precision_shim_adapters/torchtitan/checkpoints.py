"""Save the scaler's record as a tensor in a checkpoint's ``train_state``, and restore it.

torch's distributed checkpoint unpickles every value that is not a tensor. A load fails if the
checkpoint lacks a key of the trainer's state. The shim therefore first reads the checkpoint's
metadata, with a pickle reader that imports and calls nothing.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from precision_shim.adapting import Call, seam
from precision_shim.errors import CheckpointUnreadableError, ScalerCheckpointError
from precision_shim.files.metadata import NAME as METADATA
from precision_shim.files.metadata import read_metadata

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


@dataclass(frozen=True)
class _Load:
    """The path of the checkpoint being loaded, and the size of its scaler record, if any."""

    where: str
    size: tuple[int, ...] | None


_loading: ContextVar[_Load | None] = ContextVar("precision_shim_torchtitan_load", default=None)


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
    token = _loading.set(_Load(where, _size_of_record(str(checkpoint_id), where)))
    try:
        return call.proceed()
    finally:
        _loading.reset(token)


def _size_of_record(checkpoint: str, where: str) -> tuple[int, ...] | None:
    """The size of a checkpoint's scaler record, read by rank 0; errors are raised on all ranks."""
    box: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            box = [_look(checkpoint, where)]
        except ScalerCheckpointError as error:  # all ranks raise the error after the broadcast
            box = [str(error)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], str):
        raise ScalerCheckpointError(box[0])
    size: tuple[int, ...] | None = box[0]
    return size


def _look(checkpoint: str, where: str) -> tuple[int, ...] | None:
    file_name = os.path.join(checkpoint, METADATA)
    try:
        with _open_metadata(checkpoint) as file:
            entry = read_metadata(file, file_name)[1].get(f"{STATE}.{KEY}")
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
    if entry is None:
        return None
    if entry.dtype != "uint8":
        what = "an object" if entry.dtype is None else f"a tensor of {entry.dtype}"
        raise ScalerCheckpointError(
            f"{where}: it is {what} where a tensor of bytes was expected: it is damaged, and not "
            f"read. {_ANOTHER} {_OTHERWISE}"
        )
    return entry.shape


def _open_metadata(checkpoint: str) -> Any:
    if "://" not in checkpoint:
        return open(os.path.join(checkpoint, METADATA), "rb")
    from torch.distributed.checkpoint._storage_utils import _storage_setup

    reader: Any = _storage_setup(None, checkpoint, reader=True)
    return reader.fs.create_stream(reader.fs.concat_path(reader.path, METADATA), "rb")


@seam(
    at=of_both("state_dict"),
    why="what goes into a checkpoint, and what is asked of one",
    **SCALED,
)
def state_dict(call: Call) -> Any:
    """Add the scaler's record to the trainer's state; during a load, add a placeholder of zeros."""
    state = call.proceed()
    training = ScaledTraining.of(call.instance)
    if training is None:
        return state
    loading = _loading.get()
    if loading is None:
        return {**state, KEY: training.record_tensor()}
    if loading.size is None:
        return state
    return {**state, KEY: torch.zeros(loading.size, dtype=torch.uint8)}


@seam(at=of_both("load_state_dict"), why="what comes from a checkpoint", **SCALED)
def load_state_dict(call: Call, state_dict: Any) -> Any:
    """Load the trainer's state, and restore the scaler from its record."""
    training = ScaledTraining.of(call.instance)
    if training is None:
        return call.proceed()
    rest = dict(state_dict)
    record = rest.pop(KEY, None)
    call.arguments["state_dict"] = rest
    result = call.proceed()
    loading = _loading.get()
    where = loading.where if loading is not None else f"{STATE}.{KEY}"
    training.restore_record(record, where, _OTHERWISE)
    return result
