"""A scaler's state in a checkpoint directory: one small JSON file, written whole or not at all.

Rank 0 writes and reads it and tells the others, so that all end with one scale. Where checkpoint
paths are node-local, the file lies beside rank 0's own shards and comes and goes with them.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from ..errors import ScalerCheckpointError
from ..rules.scaler_record import FILE_NAME, parse
from .record import record_of, restore

__all__ = ["FILE_NAME", "agree", "load", "save"]


def save(
    directory: str | os.PathLike[str], scaler: GradScaler, group: dist.ProcessGroup | None = None
) -> Path:
    """Write the scaler's state into a checkpoint's directory; every rank of the group calls it.

    The file appears under its name only when it is complete and flushed to the disk. A process
    that is killed before leaves the file of an earlier save, or none, and at most a hidden
    temporary one.

    Args:
        directory: the checkpoint's, as rank 0 sees it; made if it is missing.
        scaler: a ``LossScaler``, or a framework's own GradScaler.
        group: the ranks that call it; ``None`` for all.

    Returns:
        The file.

    Raises:
        ScalerCheckpointError: it cannot be written; raised on every rank.
    """
    path = Path(directory) / FILE_NAME
    text = json.dumps(record_of(scaler), indent=1, sort_keys=True) + "\n"
    failure = None
    if _is_first(group):
        try:
            _write(path, text)
        except OSError as error:
            failure = (
                f"{path}: cannot write the loss scaler's state ({error.strerror or error}). A job "
                "that resumes from this checkpoint would begin with a fresh scaler; make room or "
                "give access, and save again."
            )
    failure = _from_first(failure, group)
    if failure:
        raise ScalerCheckpointError(failure)
    return path


def load(
    directory: str | os.PathLike[str], scaler: GradScaler, group: dist.ProcessGroup | None = None
) -> tuple[str, ...] | None:
    """Restore the scaler's state from a checkpoint's directory; every rank calls it.

    Args:
        directory: the checkpoint's, as rank 0 sees it.
        scaler: the scaler to restore.
        group: the ranks that call it; ``None`` for all.

    Returns:
        ``None`` if the checkpoint has no scaler state; else a line for each value that was not
        taken over as it stands there.

    Raises:
        ScalerCheckpointError: the file is damaged or cannot be read; raised on every rank, and
            the scaler is as it was.
    """
    path = Path(directory) / FILE_NAME
    text: str | None = None
    failure = None
    if _is_first(group):
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError) as error:
            failure = f"{path}: cannot read the loss scaler's state ({error})."
    text, failure = _from_first((text, failure), group)
    if failure:
        raise ScalerCheckpointError(failure)
    if text is None:
        return None
    try:
        return restore(scaler, parse(text, str(path)), str(path))
    except ScalerCheckpointError as error:
        raise ScalerCheckpointError(
            f"{error} Or delete the file to continue with a fresh scaler."
        ) from None


def agree(problem: str, record: object, where: str) -> None:
    """Stop all ranks unless each has read the same record; every rank calls it.

    Where every rank reads a file of its own, or its own part of one.

    Args:
        problem: what was wrong with this rank's record; empty if nothing.
        record: this rank's; ``None`` if it has none.
        where: the file, for messages.

    Raises:
        ScalerCheckpointError: the first rank's problem, or that they differ.
    """
    digest = record.get("digest") if isinstance(record, dict) else None
    mine = problem, digest
    all_of_them = [mine]
    if _together() and dist.get_world_size() > 1:
        all_of_them = [mine] * dist.get_world_size()
        dist.all_gather_object(all_of_them, mine)
    problems = [text for text, _ in all_of_them if text]
    if problems:
        raise ScalerCheckpointError(problems[0])
    if len({digest for _, digest in all_of_them}) > 1:
        ranks = ", ".join(
            f"{rank}: {digest[:8] if digest else 'none'}"
            for rank, (_, digest) in enumerate(all_of_them)
        )
        raise ScalerCheckpointError(
            f"{where}: the ranks' files hold different loss scaler states (digests by rank: "
            f"{ranks}): they are of different checkpoints. Give every rank the files of one."
        )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each writer has a temporary name of its own: of two saves at once one file remains, whole.
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with part.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every file system can flush a directory
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return not _together() or dist.get_rank(group) == 0


def _from_first(value: Any, group: dist.ProcessGroup | None) -> Any:
    """What rank 0 of the group has, on every rank of it."""
    if not _together() or dist.get_world_size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0) if group else 0, group=group)
    return box[0]
