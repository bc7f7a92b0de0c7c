"""A loss scaler's state in a checkpoint as a record: its format, its validation, its verdict.

A worker and the command ``checkpoint`` judge a record with the same functions, which need no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ScalerCheckpointError
from .belonging import Files, are_fingerprints, fingerprints, foreign

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


def _number(value: Any, above: float = 0.0, below: float = math.inf) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and above < value < below and value <= _LARGEST


def _count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_SCALE = _number, "a finite float32 > 0"
_WHOLE = _count, "a whole number >= 0"
_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "state.scale": _SCALE,
    "state.growth_tracker": _WHOLE,
    "settings.init_scale": _SCALE,
    "settings.growth_interval": (lambda value: _count(value, 1), "a whole number >= 1"),
    "settings.growth_factor": (lambda value: _number(value, 1.0), "a number > 1"),
    "settings.backoff_factor": (lambda value: _number(value, 0.0, 1.0), "between 0 and 1"),
    "settings.min_scale": _SCALE,
    "counters.steps": _WHOLE,
    "counters.skipped": _WHOLE,
    "counters.skipped_in_row": _WHOLE,
    ".world_size": (lambda value: _count(value, 1), "a whole number >= 1"),
    ".files": (
        lambda value: value is None or are_fingerprints(value),
        "fingerprints by names of files, or nothing",
    ),
}
"""Maps each value of a record (``part.name``) to its check, and to the allowed values in words."""


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
    version: Any = record.get("format")
    if not _count(version, 1):
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
    found: dict[str, dict[str, Any]] = {}
    for field, (fits, allowed) in _FIELDS.items():
        part, _, name = field.partition(".")
        inner = record.get(part) if part else record
        value = inner.get(name) if isinstance(inner, Mapping) else None
        if not fits(value):
            raise bad_record(where, f"{field.strip('.')} is {value!r}; allowed: {allowed}")
        found.setdefault(part, {})[name] = value
    counters, settings, scale = found["counters"], found["settings"], found["state"]["scale"]
    for name, most in (("skipped", "steps"), ("skipped_in_row", "skipped")):
        if counters[name] > counters[most]:
            allowed = f"a whole number, at most {most}"
            raise bad_record(where, f"counters.{name} is {counters[name]}; allowed: {allowed}")
    least = settings["min_scale"]
    if version > 1 and least > scale:
        raise bad_record(where, f"settings.min_scale is {least!r}, above its scale, {scale!r}")
    settings["min_scale"] = min(least, scale)  # a record of format 1 may have min_scale > scale
    rest = {**found["state"], **counters, **found[""]}
    return ScalerRecord(settings=ScalerSettings(**settings), **rest)


@dataclass(frozen=True)
class Verdict:
    """What a rank of a job, or the command ``checkpoint``, finds of a record.

    Attributes:
        where: the record's file, for messages.
        saved: the record's content; ``None`` if there is no record, or a damaged one.
        state: digest without ``files``, which differ by rank: equal on all ranks of a save.
        damage: why the record cannot be used; empty if it can.
        another: why the record is of another save than the files beside it; empty if it is not.
    """

    where: str
    saved: ScalerRecord | None = None
    state: str = ""
    damage: str = ""
    another: str = ""

    @classmethod
    def of(cls, read: Callable[[], object], where: str) -> Verdict:
        """Judge a record; ``read`` returns it, or ``None`` if there is none."""
        try:
            record = read()
            saved = None if record is None else read_record(record, where)
        except ScalerCheckpointError as error:
            return cls(where, damage=str(error))
        if not isinstance(record, Mapping):
            return cls(where)
        content = {name: value for name, value in record.items() if name != "files"}
        return cls(where, saved, digest_of(content))

    def beside(self, files: Files | None, *, named: bool = False) -> Verdict:
        """Judge the ``files`` beside the record too; with ``named`` only those that it names."""
        bound = self.saved.files if self.saved is not None else None
        if files is None or bound is None:
            return self
        try:
            prints = fingerprints({n: file for n, file in files.items() if n in bound or not named})
        except OSError as error:
            damage = (
                f"{error.filename}: cannot be read ({error.strerror or error}), so that the loss "
                f"scaler's state, {self.where}, cannot be compared with it."
            )
            return replace(self, damage=damage)
        others = foreign(bound, prints)
        if not others:
            return self
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        another = (
            f"{self.where}: the loss scaler's state is of another save than the files beside it: "
            f"{others[0]}{more} came from a later or an earlier one, which did not end, or was "
            "made without the shim, or in another dtype."
        )
        return replace(self, another=another)

    @classmethod
    def together(cls, verdicts: Sequence[Verdict]) -> Verdict:
        """Judge the records of several files or ranks: the first bad verdict, or else the first."""
        bad = [one for one in verdicts if one.damage]
        if not bad and len({one.state for one in verdicts}) > 1:
            states = (f"{i}: {one.state[:8] or 'none'}" for i, one in enumerate(verdicts))
            damage = (
                f"{verdicts[0].where}: the ranks' files hold different loss scaler states (digests "
                f"by rank: {', '.join(states)}): they are of different saves. Give every rank the "
                "files of one."
            )
            return cls(verdicts[0].where, damage=damage)
        return next((one for one in (*bad, *verdicts) if one.damage or one.another), verdicts[0])


def read_file(path: str | PathLike[str]) -> Mapping[str, Any] | None:
    """Return the record in a file, without validating it; ``None`` if there is no file.

    Raises:
        ScalerCheckpointError: the file cannot be read, or is not complete JSON.
    """
    try:
        return parse(Path(path).read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ScalerCheckpointError(
            f"{path}: cannot read the loss scaler's state ({error}). Take another checkpoint."
        ) from None


def parse(text: str, where: str) -> Mapping[str, Any]:
    """Parse the JSON text of a record, without validating the record.

    Raises:
        ScalerCheckpointError: the text is not complete JSON, or contains no object.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScalerCheckpointError(
            f"{where}: not whole JSON ({error}): the file is damaged or truncated. Take another "
            "checkpoint."
        ) from None
    if not isinstance(record, dict):
        raise bad_record(where, "it holds no loss scaler state")
    return record


def parse_bytes(content: bytes, where: str) -> Mapping[str, Any]:
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
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the state of a scaler to restore: the record's values, or the user's settings.

    Returns:
        The state for ``load_state_dict``, and a line of text for each value that differs from the
        record.
    """
    lines: list[str] = []
    state: dict[str, Any] = {"scale": saved.scale}
    for name in ("growth_interval", "growth_factor", "backoff_factor"):
        state[name] = getattr(saved.settings, name)
        if name in mine.chosen and getattr(mine, name) != state[name]:
            lines.append(
                f"{name} {getattr(mine, name):g}, as set here, and not {state[name]:g} of {where}"
            )
            state[name] = getattr(mine, name)
    # Use the lower of the saved and the process's min_scale: a higher bound could raise the scale.
    state["min_scale"] = min(saved.settings.min_scale, mine.min_scale)
    if state["min_scale"] != saved.settings.min_scale:
        lines.append(
            f"least scale {mine.min_scale:g}, as set here, and not {saved.settings.min_scale:g} of "
            f"{where}"
        )
    state["_growth_tracker"], line = lower_tracker(saved.growth_tracker, state["growth_interval"])
    return state, (*lines, line) if line else tuple(lines)


def lower_tracker(tracker: int, growth_interval: float) -> tuple[int, str]:
    """Lower a checkpoint's growth tracker to just below a growth interval; say so, if it changes.

    torch's and Megatron's scalers grow the scale if tracker == interval. With a tracker above the
    interval the scale would never grow again. Megatron's interval may be fractional.
    """
    most = math.ceil(growth_interval) - 1
    if tracker <= most:
        return tracker, ""
    return most, f"growth tracker {most} and not {tracker}: it grows next step"


def signed(record: Mapping[str, Any], files: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a record with its digest, and with the fingerprints of the files saved with it."""
    content = dict(record) if files is None else {**record, "files": dict(files)}
    return {**content, "digest": digest_of(content)}


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
