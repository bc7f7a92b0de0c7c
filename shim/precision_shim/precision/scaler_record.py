"""A loss scaler's state in a checkpoint as a record, and its validation. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..errors import ScalerCheckpointError
from .belonging import are_fingerprints

KIND = "precision_shim.loss_scaler"
FORMAT = 2
"""Version of the record's format. A reader also accepts version 1, which has no ``files``."""

FILE_NAME = "precision_shim_scaler.json"
"""Name of a scaler record's file in a checkpoint that is a directory."""

MAX_SKIPS = 25
"""Number of consecutive skipped steps that end a job. Sixteen halvings reduce the default initial
scale from 65536 to 1. If gradients overflow even at scale 1, the scale is not the cause."""

_LARGEST = (2.0 - 2.0**-23) * 2.0**127  # the largest finite float32


@dataclass(frozen=True)
class ScalerSettings:
    """The settings of a loss scaler: four that ``torch.amp.GradScaler`` has too, and three more.

    Attributes:
        init_scale: initial loss scale.
        growth_interval: steps without overflow before it grows: 400 as in verl, for short RL runs.
        growth_factor: factor by which the scale grows, above 1.
        backoff_factor: factor by which the scale shrinks at an overflow, between 0 and 1.
        min_scale: lower bound of the scale; adapters lower it to an ``init_scale`` below 1.
        max_skips: number of consecutive skipped steps that raises an error.
        chosen: what the user set here; a growth interval or factor here overrides a checkpoint's.
    """

    init_scale: float = 65536.0
    growth_interval: int = 400
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    max_skips: int = MAX_SKIPS
    chosen: frozenset[str] = frozenset()


def in_words(
    init_scale: float, growth_factor: float, growth_interval: float, backoff_factor: float
) -> str:
    """Describe a scaler's settings, for the text of a decision."""
    return (
        f"from {init_scale:.10g}, growth x{growth_factor:g} after {growth_interval:g} steps, "
        f"backoff x{backoff_factor:g}"
    )


@dataclass(frozen=True)
class ScalerRecord:
    """The validated content of a record.

    Attributes:
        scale: loss scale, finite and above 0.
        growth_tracker: steps without overflow since the scale last changed.
        settings: the scaler's settings.
        steps: number of optimizer steps, including skipped steps.
        skipped: number of skipped steps.
        skipped_in_row: number of skips since the last step that was not skipped.
        world_size: number of ranks of the job that wrote the record.
        files: fingerprints (``belonging``) of the files saved with it; ``None`` if it lists none.
    """

    scale: float
    growth_tracker: int
    settings: ScalerSettings
    steps: int
    skipped: int
    skipped_in_row: int
    world_size: int
    files: Mapping[str, str] | None = None


def read_record(record: object, where: str) -> ScalerRecord:
    """Validate a record and return its content.

    Args:
        record: the result of ``record_of``, read back from JSON or from a framework's file.
        where: the file, for messages.

    Raises:
        ScalerCheckpointError: it is no record, damaged, of a newer format, or has an invalid value.
    """
    if not isinstance(record, Mapping) or record.get("kind") != KIND:
        raise bad_record(where, "it holds no loss scaler state")
    version = record.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise bad_record(where, f"its format is {version!r}; a whole number was expected")
    if version > FORMAT:
        raise ScalerCheckpointError(
            f"{where}: written in format {version} by a newer precision_shim; this one "
            f"({__version__}) reads formats up to {FORMAT}. Upgrade precision_shim, or take "
            "another checkpoint."
        )
    digest = digest_of(record)
    if not digest or record.get("digest") != digest:
        raise bad_record(where, "its content does not match its digest: the file is damaged")
    positive, whole = _number(above=0.0), _count(0)

    def read(part: str, name: str, check: Callable[[Any], bool], allowed: str) -> Any:
        inner = record.get(part) if part else record
        value = inner.get(name) if isinstance(inner, Mapping) else None
        if not check(value):
            full = f"{part}.{name}" if part else name
            raise bad_record(where, f"{full} is {value!r}; allowed: {allowed}")
        return value

    scale = read("state", "scale", positive, "a finite float32 > 0")
    least = read("settings", "min_scale", positive, "a finite float32 > 0")
    if version > 1 and least > scale:
        raise bad_record(where, f"settings.min_scale is {least!r}, above its scale, {scale!r}")
    interval = read("settings", "growth_interval", _count(1), "a whole number >= 1")
    steps = read("counters", "steps", whole, "a whole number >= 0")
    skipped = read("counters", "skipped", _count(0, steps), "a whole number, at most steps")
    return ScalerRecord(
        scale=scale,
        growth_tracker=read("state", "growth_tracker", whole, "a whole number >= 0"),
        settings=ScalerSettings(
            init_scale=read("settings", "init_scale", positive, "a finite float32 > 0"),
            growth_interval=interval,
            growth_factor=read("settings", "growth_factor", _number(above=1.0), "a number > 1"),
            backoff_factor=read(
                "settings", "backoff_factor", _number(above=0.0, below=1.0), "between 0 and 1"
            ),
            min_scale=min(least, scale),  # a record of format 1 may have min_scale > scale
        ),
        steps=steps,
        skipped=skipped,
        skipped_in_row=read(
            "counters", "skipped_in_row", _count(0, skipped), "a whole number, at most skipped"
        ),
        world_size=read("", "world_size", _count(1), "a whole number >= 1"),
        files=read("", "files", _files, "fingerprints by names of files, or nothing"),
    )


def parse(text: str, where: str) -> object:
    """Parse the JSON text of a record, without validating the record.

    Raises:
        ScalerCheckpointError: the text is not complete JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScalerCheckpointError(
            f"{where}: not whole JSON ({error}): the file is damaged or truncated. Take another "
            "checkpoint."
        ) from None


def parse_bytes(content: bytes, where: str) -> object:
    """Parse a record from a tensor's zero-padded bytes, without validating the record.

    Raises:
        ScalerCheckpointError: the bytes are not a record.
    """
    text = content.rstrip(b"\0")
    if not text:
        raise bad_record(where, "it holds no loss scaler state")
    return parse(text.decode(errors="replace"), where)


def choose_values(
    saved: ScalerRecord, mine: ScalerSettings, where: str
) -> tuple[dict[str, Any], int, tuple[str, ...]]:
    """Return the values for restoring a scaler: the record's values, or the user's settings.

    Returns:
        A tuple of a dict (growth interval, both factors, ``min_scale``), the growth tracker, and a
        line of text for each value that differs from the record.
    """
    lines: list[str] = []
    values: dict[str, Any] = {}
    for name in ("growth_interval", "growth_factor", "backoff_factor"):
        values[name] = getattr(saved.settings, name)
        if name in mine.chosen and getattr(mine, name) != values[name]:
            lines.append(
                f"{name} {getattr(mine, name):g}, as set here, and not {values[name]:g} of {where}"
            )
            values[name] = getattr(mine, name)
    # Use the lower of the saved and the process's min_scale: a higher bound could raise the scale.
    values["min_scale"] = min(saved.settings.min_scale, mine.min_scale)
    if values["min_scale"] != saved.settings.min_scale:
        lines.append(
            f"least scale {mine.min_scale:g}, as set here, and not {saved.settings.min_scale:g} of "
            f"{where}"
        )
    tracker, line = lower_tracker(saved.growth_tracker, values["growth_interval"])
    return values, tracker, (*lines, line) if line else tuple(lines)


def lower_tracker(tracker: int, growth_interval: float) -> tuple[int, str]:
    """Lower a checkpoint's growth tracker to just below a growth interval; say so, if it changes.

    torch's and Megatron's scalers grow the scale if tracker == interval. With a tracker above the
    interval the scale would never grow again. Megatron's interval may be fractional.
    """
    most = math.ceil(growth_interval) - 1
    if tracker <= most:
        return tracker, ""
    return most, f"growth tracker {most} and not {tracker}: it grows next step"


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


def _files(value: object) -> bool:
    return value is None or are_fingerprints(value)


def state_of(record: object) -> str:
    """Return a digest without ``files``, which differ by rank: equal on all ranks of a save."""
    if not isinstance(record, Mapping):
        return ""
    return digest_of({name: value for name, value in record.items() if name != "files"})


def digest_of(record: Mapping[str, Any]) -> str:
    """Return the digest that a record must contain; empty if JSON cannot represent the record."""
    # A float's JSON text is read back as the same float, so a digest of the text covers all bits.
    content = {str(name): value for name, value in record.items() if name != "digest"}
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()


def bad_record(where: str, found: str) -> ScalerCheckpointError:
    """Return the error for a rejected record; the message has a remedy."""
    return ScalerCheckpointError(
        f"{where}: {found}. The loss scaler is not restored from it. Take another checkpoint."
    )
