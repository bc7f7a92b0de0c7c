"""A scaler's state as data: one JSON format, one reader."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from .. import __version__
from ..errors import ScalerCheckpointError
from .scaler import LossScaler, ScalerSettings

KIND = "precision_shim.loss_scaler"
FORMAT = 1
"""Version of the format. A reader takes its own and older ones."""

_BYTES = 2048
"""Size of a record as a tensor: three times what one takes now."""

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class ScalerRecord:
    """The validated content of a record.

    Attributes:
        scale: loss scale, finite and above 0.
        growth_tracker: steps without overflow since the scale last changed.
        settings: what the scaler was made with.
        steps: optimizer steps tried so far.
        skipped: how many of them were skipped.
        skipped_in_row: skips since the last step that was taken.
        world_size: ranks of the job that wrote it.
    """

    scale: float
    growth_tracker: int
    settings: ScalerSettings
    steps: int
    skipped: int
    skipped_in_row: int
    world_size: int


def record_of(scaler: GradScaler) -> dict[str, Any]:
    """A scaler's state, ready for JSON.

    Args:
        scaler: a ``LossScaler``, or a framework's own GradScaler, which has no counters.

    Returns:
        ``kind``, ``format``, ``state``, ``settings``, ``counters``, ``world_size``,
        ``written_by``, and a ``digest`` over all of it.
    """
    state = scaler.state_dict()
    ours = isinstance(scaler, LossScaler)
    settings = scaler.settings if isinstance(scaler, LossScaler) else ScalerSettings()
    counter = scaler.counter if isinstance(scaler, LossScaler) else None
    record: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "state": {"scale": state["scale"], "growth_tracker": state["_growth_tracker"]},
        "settings": {
            "init_scale": settings.init_scale if ours else state["scale"],
            "growth_interval": state["growth_interval"],
            "growth_factor": state["growth_factor"],
            "backoff_factor": state["backoff_factor"],
            "min_scale": settings.min_scale,
        },
        "counters": {
            "steps": counter.steps if counter else 0,
            "skipped": counter.skipped if counter else 0,
            "skipped_in_row": counter.in_row if counter else 0,
        },
        "world_size": _world_size(),
        "written_by": {"precision_shim": __version__, "torch": str(torch.__version__)},
    }
    record["digest"] = _digest(record)
    return record


def read_record(record: object, where: str) -> ScalerRecord:
    """Validate a record.

    Args:
        record: what ``record_of`` gave, after a way through JSON or through a framework's file.
        where: the file, for messages.

    Raises:
        ScalerCheckpointError: it is none, is damaged, of a newer format, or holds a value that
            cannot be.
    """
    if not isinstance(record, Mapping) or record.get("kind") != KIND:
        raise _bad(where, "it holds no loss scaler state")
    version = record.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _bad(where, f"its format is {version!r}; a whole number was expected")
    if version > FORMAT:
        raise ScalerCheckpointError(
            f"{where}: written in format {version} by a newer precision_shim; this one "
            f"({__version__}) reads formats up to {FORMAT}. Upgrade precision_shim, or delete "
            "the file to continue with a fresh scaler."
        )
    if record.get("digest") != _digest(record):
        raise _bad(where, "its content does not match its digest: the file is damaged")
    positive, whole = _number(above=0.0), _count(0)
    read = _Reader(record, where)
    interval = read("settings", "growth_interval", _count(1), "a whole number >= 1")
    steps = read("counters", "steps", whole, "a whole number >= 0")
    skipped = read("counters", "skipped", _count(0, steps), "a whole number, at most steps")
    return ScalerRecord(
        scale=read("state", "scale", positive, "a finite float32 > 0"),
        growth_tracker=read("state", "growth_tracker", whole, "a whole number >= 0"),
        settings=ScalerSettings(
            init_scale=read("settings", "init_scale", positive, "a finite float32 > 0"),
            growth_interval=interval,
            growth_factor=read("settings", "growth_factor", _number(above=1.0), "a number > 1"),
            backoff_factor=read(
                "settings", "backoff_factor", _number(above=0.0, below=1.0), "between 0 and 1"
            ),
            min_scale=read("settings", "min_scale", _number(above=0.0), "a finite float32 > 0"),
        ),
        steps=steps,
        skipped=skipped,
        skipped_in_row=read(
            "counters", "skipped_in_row", _count(0, skipped), "a whole number, at most skipped"
        ),
        world_size=read("", "world_size", _count(1), "a whole number >= 1"),
    )


def restore(scaler: GradScaler, record: object, where: str) -> tuple[str, ...]:
    """Bring a scaler to a record's state.

    Scale, growth tracker, counters and settings come from the record, except a setting that this
    process's user chose.

    Args:
        scaler: a ``LossScaler``, or a framework's own GradScaler.
        record: see ``read_record``.
        where: the file, for messages.

    Returns:
        One line for each value that was not taken over as it stands there.

    Raises:
        ScalerCheckpointError: see ``read_record``; the scaler is then as it was.
    """
    saved = read_record(record, where)
    lines: list[str] = []
    values: dict[str, Any] = {}
    mine = scaler.settings if isinstance(scaler, LossScaler) else ScalerSettings()
    for name in ("growth_interval", "growth_factor", "backoff_factor"):
        values[name] = getattr(saved.settings, name)
        if name in mine.chosen and getattr(mine, name) != values[name]:
            lines.append(
                f"{name} {getattr(mine, name):g}, as set here, and not {values[name]:g} of {where}"
            )
            values[name] = getattr(mine, name)
    # torch compares the tracker with the interval for equality: past it the scale never grows.
    tracker = min(saved.growth_tracker, values["growth_interval"] - 1)
    if tracker != saved.growth_tracker:
        lines.append(f"growth tracker {tracker} and not {saved.growth_tracker}: it grows next step")
    scaler.load_state_dict({"scale": saved.scale, "_growth_tracker": tracker, **values})
    if isinstance(scaler, LossScaler):
        scaler.counter.steps = saved.steps
        scaler.counter.skipped = saved.skipped
        scaler.counter.in_row = saved.skipped_in_row
    return tuple(lines)


def parse(text: str, where: str) -> object:
    """Read the JSON text of a record, which is yet to be validated.

    Raises:
        ScalerCheckpointError: it is not whole JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScalerCheckpointError(
            f"{where}: not whole JSON ({error}): the file is damaged or truncated. Take another "
            "checkpoint, or delete the file to continue with a fresh scaler."
        ) from None


def to_tensor(record: Mapping[str, Any] | None = None) -> torch.Tensor:
    """A record as a tensor of bytes, on the CPU: the same size for every record.

    For torch's distributed checkpoints, which unpickle all that is no tensor, and which read into a
    tensor of the size that was saved.

    Args:
        record: from ``record_of``; ``None`` for an empty tensor to read into.
    """
    text = b"" if record is None else json.dumps(record, sort_keys=True).encode()
    if len(text) > _BYTES:
        raise ScalerCheckpointError(
            f"a loss scaler's record takes {len(text)} bytes; {_BYTES} are allowed in a tensor. "
            "Save it as a file or as data instead."
        )
    return torch.frombuffer(bytearray(text.ljust(_BYTES, b"\0")), dtype=torch.uint8)


def from_tensor(tensor: torch.Tensor, where: str) -> object:
    """The record in a tensor of bytes, which is yet to be validated.

    Args:
        tensor: what ``to_tensor`` gave, after a way through a checkpoint.
        where: the file, for messages.

    Raises:
        ScalerCheckpointError: the bytes are no record.
    """
    if tensor.dtype is not torch.uint8:
        raise _bad(where, f"it holds {tensor.dtype} where a record's bytes were expected")
    text = bytes(tensor.flatten().tolist()).rstrip(b"\0")
    if not text:
        raise _bad(where, "it holds no loss scaler state")
    return parse(text.decode(errors="replace"), where)


class _Reader:
    """Takes values out of a record, each checked."""

    def __init__(self, record: Mapping[str, Any], where: str) -> None:
        self._record, self._where = record, where

    def __call__(self, part: str, name: str, check: Any, allowed: str) -> Any:
        inner = self._record.get(part) if part else self._record
        value = inner.get(name) if isinstance(inner, Mapping) else None
        if not check(value):
            full = f"{part}.{name}" if part else name
            raise _bad(self._where, f"{full} is {value!r}; allowed: {allowed}")
        return value


def _number(above: float, below: float = math.inf) -> Any:
    def check(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return above < value < below and value <= _LARGEST

    return check


def _count(low: int, high: float = math.inf) -> Any:
    def check(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return check


def _digest(record: Mapping[str, Any]) -> str:
    # JSON writes a float so that it reads back as the same float, so the text stands for the bits.
    content = {str(name): value for name, value in record.items() if name != "digest"}
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _bad(where: str, found: str) -> ScalerCheckpointError:
    return ScalerCheckpointError(
        f"{where}: {found}. The loss scaler is not restored from it; take another checkpoint, or "
        "delete the file to continue with a fresh scaler."
    )
