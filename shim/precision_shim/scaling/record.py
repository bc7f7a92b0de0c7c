"""Convert a scaler's state to a record for JSON, and restore a scaler from a record."""

from __future__ import annotations

import contextlib
import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from .. import __version__
from ..errors import ScalerCheckpointError
from ..precision.belonging import fingerprints
from ..precision.scaler_record import (
    FORMAT,
    KIND,
    ScalerSettings,
    bad_record,
    choose_values,
    digest_of,
    parse_bytes,
    read_record,
)
from .scaler import LossScaler
from .skips import SkipCounter

_BYTES = 2048
"""Size of a record's tensor, in bytes; a record without ``files`` needs less than a third of it."""


def record_of(scaler: GradScaler, save: str = "") -> dict[str, Any]:
    """Return a scaler's state as a record that can be written as JSON.

    Args:
        scaler: a ``LossScaler``, or a framework's own GradScaler, which has no counters and no
            ``min_scale``.
        save: the name of the save, if each rank writes a record: it tells the ranks' files of one
            save from those of another.
    """
    state = scaler.state_dict()
    if isinstance(scaler, LossScaler):
        settings, counter = scaler.settings, scaler.counter
    else:
        settings, counter = ScalerSettings(init_scale=state["scale"]), SkipCounter()
    record: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "state": {"scale": state["scale"], "growth_tracker": state["_growth_tracker"]},
        "settings": {
            "init_scale": settings.init_scale,
            "growth_interval": state["growth_interval"],
            "growth_factor": state["growth_factor"],
            "backoff_factor": state["backoff_factor"],
            "min_scale": min(state.get("min_scale", settings.min_scale), state["scale"]),
        },
        "counters": {
            "steps": counter.steps,
            "skipped": counter.skipped,
            "skipped_in_row": counter.in_row,
        },
        "world_size": _world_size(),
        "written_by": {"precision_shim": __version__, "torch": str(torch.__version__)},
    }
    if save:
        record["save"] = save
    record["digest"] = digest_of(record)
    return record


def bind(record: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """Return a record that lists the fingerprints of the files that are saved with it."""
    bound = {**record, "files": dict(files)}
    return {**bound, "digest": digest_of(bound)}


class BoundWhenPickled(OrderedDict[str, Any]):
    """A record that, when pickled, adds the fingerprints of the other files of the same save.

    ``BoundWhenPickled`` is for a framework that requests the record while a save is still writing
    ``files``, and pickles the record into the save's last file. The record is pickled as an
    ``OrderedDict``, which a process without the shim can read.
    """

    def __init__(
        self, record: Mapping[str, Any], files: Mapping[str, str | os.PathLike[str]]
    ) -> None:
        super().__init__(record)
        self._files = files

    def __reduce_ex__(self, protocol: Any) -> Any:
        bound = OrderedDict(self)
        with contextlib.suppress(OSError):  # an unreadable file must not fail the framework's save
            prints = fingerprints(self._files)
            if prints:
                bound["files"] = prints
                bound["digest"] = digest_of(bound)
        return bound.__reduce_ex__(protocol)


def restore(scaler: GradScaler, record: object, where: str) -> tuple[str, ...]:
    """Restore a scaler to a record's state; return a line for each value that differs from it.

    The record supplies scale, growth tracker, counters and settings, except a growth interval or
    factors that the user set in this process. ``min_scale`` becomes the lower of the saved value
    and this process's value.

    Args:
        scaler: a ``LossScaler``, or a framework's own GradScaler.
        record: see ``read_record``.
        where: the file, for messages.

    Raises:
        ScalerCheckpointError: see ``read_record``; the scaler is then unchanged.
    """
    saved = read_record(record, where)
    mine = scaler.settings if isinstance(scaler, LossScaler) else ScalerSettings()
    values, tracker, lines = choose_values(saved, mine, where)
    scaler.load_state_dict({"scale": saved.scale, "_growth_tracker": tracker, **values})
    if isinstance(scaler, LossScaler):
        scaler.counter.steps = saved.steps
        scaler.counter.skipped = saved.skipped
        scaler.counter.in_row = saved.skipped_in_row
    return lines


def to_tensor(record: Mapping[str, Any] | None = None) -> torch.Tensor:
    """Return a record as a CPU tensor of bytes, whose size is the same for every record.

    torch's distributed checkpoints unpickle everything except tensors, and load a tensor only into
    a tensor of the saved size.

    Args:
        record: from ``record_of``; ``None`` for an empty tensor to load into.
    """
    text = b"" if record is None else json.dumps(record, sort_keys=True).encode()
    if len(text) > _BYTES:
        raise ScalerCheckpointError(
            f"a loss scaler's record takes {len(text)} bytes; {_BYTES} are allowed in a tensor. "
            "Save it as a file or as data instead."
        )
    return torch.frombuffer(bytearray(text.ljust(_BYTES, b"\0")), dtype=torch.uint8)


def from_tensor(tensor: torch.Tensor, where: str) -> object:
    """Return the record in a tensor of ``to_tensor``, without validating the record.

    Raises:
        ScalerCheckpointError: the bytes are not a record.
    """
    if tensor.dtype is not torch.uint8:
        raise bad_record(where, f"it holds {tensor.dtype} where a record's bytes were expected")
    return parse_bytes(bytes(tensor.flatten().tolist()), where)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
