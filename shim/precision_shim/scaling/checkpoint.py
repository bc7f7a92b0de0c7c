"""A scaler's state in a checkpoint directory: one small JSON file, replaced atomically.

Rank 0 writes and reads the file, next to its own shards, and broadcasts it, so all ranks have one
scale. The record has a fingerprint of each checkpoint file of all ranks (``precision.belonging``);
``load`` rejects a record if the files next to it were written by another save.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from ..errors import ScalerCheckpointError, ScalerOfAnotherSaveError
from ..precision.belonging import files_beneath, fingerprint, fingerprints, foreign
from ..precision.scaler_record import FILE_NAME, parse, read_record, state_of
from .record import bind, record_of, restore

Files = Mapping[str, "str | os.PathLike[str]"]
"""Maps a file's name in a checkpoint to the path of this rank's file."""


class SaveAside:
    """One save of all ranks, which a framework writes into empty directories of this save alone.

    ``publish`` moves the whole files into place. So the scaler's record names what this save wrote,
    even if another job saves into the same directories at the same time; and a process that is
    killed before leaves the files of the earlier save whole. Every rank makes a ``SaveAside``, and
    saves in a with block, or calls ``publish`` after a save in the background.

    Attributes:
        name: unlike that of any other save, and the same on all ranks.
        places: the directory to write into, by the name of the directory that it stands for.
        prints: fingerprints of the files that this rank has moved into place.
    """

    def __init__(
        self, directories: Mapping[str, str | os.PathLike[str]], group: dist.ProcessGroup | None
    ) -> None:
        """``directories``: by their paths relative to the record's directory, ending in ``/``."""
        self.name = _from_first(uuid.uuid4().hex, group)
        self.places: dict[str, str] = {}
        self.prints: dict[str, str] = {}
        self._targets = {name: os.path.abspath(place) for name, place in directories.items()}
        for name, target in self._targets.items():
            self.places[name] = os.path.join(self._own(target), os.path.basename(target))

    def __enter__(self) -> SaveAside:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.publish(None)
        else:
            self._discard()

    def publish(self, group: dist.ProcessGroup | None) -> None:
        """Move all files into place.

        Raises:
            ScalerCheckpointError: on every rank: a file cannot be moved, and the rest stays aside.
        """
        _from_all(None, group)  # until all ranks have written all files
        failure = ""
        try:
            self._move(group)
        except OSError as error:
            failure = (
                f"{error.filename}: cannot be moved to its place in the checkpoint "
                f"({error.strerror or error}). The checkpoint is not whole; save again."
            )
        failures = [text for text in _from_all(failure, group) if text]
        if failures:
            raise ScalerCheckpointError(failures[0])
        self._discard()

    def _move(self, group: dist.ProcessGroup | None) -> None:
        ranks = dist.get_world_size(group) if _together() else 1
        for name, aside in self.places.items():
            names = {path: bound for bound, path in files_beneath(aside, name).items()}
            files = [
                os.path.join(place, file) for place, _, all_ in os.walk(aside) for file in all_
            ]
            start = len(files) * dist.get_rank(group) // ranks if _together() else 0
            for path in (*files[start:], *files[:start]):
                target = os.path.join(self._targets[name], os.path.relpath(path, aside))
                with contextlib.suppress(FileNotFoundError):  # another rank has moved it
                    print_ = fingerprint(path) if path in names else ""
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                    os.replace(path, target)
                    if print_:
                        self.prints[names[path]] = print_

    def _discard(self) -> None:
        for target in self._targets.values():
            shutil.rmtree(self._own(target), ignore_errors=True)

    def _own(self, target: str) -> str:
        return os.path.join(target, f".precision_shim_{self.name}")


def save(
    directory: str | os.PathLike[str],
    scaler: GradScaler,
    group: dist.ProcessGroup | None = None,
    prints: Mapping[str, str] | None = None,
    record: Mapping[str, Any] | None = None,
) -> Path:
    """Write the scaler's state into a checkpoint's directory; called by every rank of the group.

    Call ``save`` after the framework has written its own files. The scaler's file is replaced only
    when it is complete and flushed; if the process is killed before, that of an earlier save stays.

    Args:
        directory: this rank's path of the checkpoint's directory; rank 0 creates the directory.
        scaler: a ``LossScaler``, or a framework's own GradScaler.
        group: the calling ranks; ``None`` for all ranks.
        prints: fingerprints of the files that a ``SaveAside`` moved, for ``load`` to compare.
        record: an earlier state of the scaler, if the framework saved in the background.

    Raises:
        ScalerCheckpointError: on every rank: the state cannot be written.
    """
    path, failure = Path(directory) / FILE_NAME, ""
    record = record_of(scaler) if record is None else record
    if prints is not None:
        every = _from_all(prints, group)
        record = bind(record, {name: one for prints in every for name, one in prints.items()})
    if _is_first(group):
        try:
            _write(path, json.dumps(record, indent=1, sort_keys=True) + "\n")
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
    directory: str | os.PathLike[str],
    scaler: GradScaler,
    group: dist.ProcessGroup | None = None,
    files: Files | None = None,
) -> tuple[str, ...] | None:
    """Restore the scaler's state from a checkpoint's directory; called by every rank.

    Returns ``None`` if the checkpoint has no scaler state; otherwise a line of text for each
    restored value that differs from the saved value, or for a saved state without a list of files.
    ``files`` are this rank's files of the checkpoint, to compare with those of the save.

    Raises:
        ScalerOfAnotherSaveError: the ``files`` and the state are from different saves.
        ScalerCheckpointError: the file is damaged or cannot be read. Every rank raises the same
            error, and the scaler is then unchanged.
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
        record = parse(text, str(path))
        bound = read_record(record, str(path)).files
    except ScalerCheckpointError as error:
        raise ScalerCheckpointError(
            f"{error} Or delete the file to continue with a fresh scaler."
        ) from None
    unknown: tuple[str, ...] = ()
    if files is not None and bound is None:
        unknown = (
            "it does not say which files it was written with, so it is not compared with them",
        )
    elif files is not None and bound is not None:
        others = foreign(bound, _fingerprints_of_all(path, files, group))
        if others:
            raise _of_another_save(str(path), others)
    return (*restore(scaler, record, str(path)), *unknown)


def other_save(record: object, where: str, files: Files | None) -> str:
    """Validate a scaler's record that a framework saved in its own file; call before ``agree``.

    Returns a message if this rank's ``files`` and the record are from different saves; otherwise
    ``""``. ``where`` is the record's file, for messages.

    Raises:
        ScalerCheckpointError: the record is damaged, or a file cannot be read.
    """
    bound = read_record(record, where).files
    if bound is None or files is None:
        return ""
    try:
        others = foreign(bound, fingerprints(files))
    except OSError as error:
        raise _unreadable(error, where) from None
    return str(_of_another_save(where, others)) if others else ""


def _of_another_save(where: str, files: list[str]) -> ScalerOfAnotherSaveError:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return ScalerOfAnotherSaveError(
        f"{where}: the loss scaler's state is of another save than the files beside it: "
        f"{files[0]}{more} came from a later or an earlier one, which did not end, or was made "
        "without the shim, or in another dtype."
    )


def agree(problem: str, record: object, where: str, another: str = "") -> str:
    """Raise an error on all ranks unless all ranks have read the same state; called by all ranks.

    Use ``agree`` if every rank reads its own file of a checkpoint, or its own part of a file.

    Args:
        problem: an error message about this rank's record; empty if the record is valid.
        record: this rank's record; ``None`` if the rank has no record.
        where: the file, for messages.
        another: the result of ``other_save`` on this rank.

    Returns:
        The first message in the ranks' arguments ``another``; empty if all are empty.

    Raises:
        ScalerCheckpointError: a rank has a ``problem``, or the ranks' states differ.
    """
    all_of_them = _from_all((problem, state_of(record), another))
    problems = [text for text, *_ in all_of_them if text]
    if problems:
        raise ScalerCheckpointError(problems[0])
    if len({digest for _, digest, _ in all_of_them}) > 1:
        ranks = ", ".join(
            f"{rank}: {digest[:8] if digest else 'none'}"
            for rank, (_, digest, _) in enumerate(all_of_them)
        )
        raise ScalerCheckpointError(
            f"{where}: the ranks' files hold different loss scaler states (digests by rank: "
            f"{ranks}): they are of different checkpoints. Give every rank the files of one."
        )
    return next((text for *_, text in all_of_them if text), "")


def _fingerprints_of_all(
    path: Path, files: Files, group: dist.ProcessGroup | None
) -> dict[str, str]:
    mine: dict[str, str] = {}
    failure = ""
    try:
        mine = fingerprints(files)
    except OSError as error:
        failure = str(_unreadable(error, str(path)))
    every = _from_all((mine, failure), group)
    failures = [failure_of_rank for _, failure_of_rank in every if failure_of_rank]
    if failures:
        raise ScalerCheckpointError(failures[0])
    return {name: print_ for of_rank, _ in every for name, print_ in of_rank.items()}


def _unreadable(error: OSError, where: str) -> ScalerCheckpointError:
    return ScalerCheckpointError(
        f"{error.filename}: cannot be read ({error.strerror or error}), so that the loss scaler's "
        f"state, {where}, cannot be compared with it."
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each writer has its own temporary name, so that two simultaneous saves leave a complete file.
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


def _from_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    if not _together() or dist.get_world_size(group) == 1:
        return [value]
    every = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group=group)
    return every


def _from_first(value: Any, group: dist.ProcessGroup | None) -> Any:
    if not _together() or dist.get_world_size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0) if group else 0, group=group)
    return box[0]
