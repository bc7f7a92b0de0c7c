"""Write a scaler's state as a record into a checkpoint, and restore it.

The record is one small JSON file, replaced atomically, or a value in a file of the framework. Rank
0 writes and reads the JSON file for all ranks. The record has a fingerprint of each checkpoint file
of all ranks (``belonging``); a record is rejected if the files were written by another save.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from .. import __version__
from ..errors import ScalerCheckpointError, ScalerOfAnotherSaveError
from ..files.writing import write_whole
from ..process.session import check_ranks
from .belonging import Files, files_beneath, fingerprint, fingerprints
from .record import (
    FILE_NAME,
    FORMAT,
    KIND,
    ScalerSettings,
    Verdict,
    bad_record,
    choose_values,
    parse_bytes,
    read_file,
    signed,
)
from .scaler import LossScaler
from .skips import SkipCounter

_BYTES = 2048
"""Size of a record's tensor, in bytes; a record without ``files`` needs less than a third of it."""


def record_of(scaler: GradScaler, save: str = "") -> dict[str, Any]:
    """Return a scaler's state as a record that can be written as JSON.

    Args:
        scaler: a ``LossScaler``, or a framework's GradScaler, which has no counters and no
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
        "world_size": _place()[1],
        "written_by": {"precision_shim": __version__, "torch": str(torch.__version__)},
    }
    return signed({**record, "save": save} if save else record)


class BoundWhenPickled(OrderedDict[str, Any]):
    """A record that, when pickled, adds the fingerprints of the other files of the same save.

    ``BoundWhenPickled`` is for a framework that requests the record while a save is still writing
    ``files``, and pickles the record into the save's last file. The record is pickled as an
    ``OrderedDict``, which a process without the shim can read.
    """

    def __init__(self, record: Mapping[str, Any], files: Files) -> None:
        super().__init__(record)
        self._files = files

    def __reduce_ex__(self, protocol: Any) -> Any:
        prints = None
        with contextlib.suppress(OSError):  # an unreadable file must not fail the framework's save
            prints = fingerprints(self._files) or None
        return OrderedDict(signed(self, prints)).__reduce_ex__(protocol)


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


def from_tensor(tensor: torch.Tensor, where: str) -> Mapping[str, Any]:
    """Return the record in a tensor of ``to_tensor``, without validating the record.

    Raises:
        ScalerCheckpointError: the bytes are not a record.
    """
    if tensor.dtype is not torch.uint8:
        raise bad_record(where, f"it holds {tensor.dtype} where a record's bytes were expected")
    return parse_bytes(bytes(tensor.flatten().tolist()), where)


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

    def __init__(self, directories: Files) -> None:
        """``directories``: by their paths relative to the record's directory, ending in ``/``."""
        self.name = _from_all(uuid.uuid4().hex)[0]
        self.places: dict[str, str] = {}
        self.prints: dict[str, str] = {}
        self._targets = {name: os.path.abspath(place) for name, place in directories.items()}
        for name, target in self._targets.items():
            self.places[name] = os.path.join(self._own(target), os.path.basename(target))

    def __enter__(self) -> SaveAside:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.publish()
        else:
            self._discard()

    def publish(self, group: dist.ProcessGroup | None = None) -> None:
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
        raise_together(failure, group)
        self._discard()

    def _move(self, group: dist.ProcessGroup | None) -> None:
        rank, ranks = _place(group)
        for name, aside in self.places.items():
            names = {path: bound for bound, path in files_beneath(aside, name).items()}
            files = [
                os.path.join(place, file) for place, _, all_ in os.walk(aside) for file in all_
            ]
            start = len(files) * rank // ranks
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


def files_of_rank(directories: Mapping[str, str]) -> Files:
    """Return this rank's share of a checkpoint's files; for ``directories`` see ``SaveAside``."""
    rank, ranks = _place()
    files = [
        item for name, place in directories.items() for item in files_beneath(place, name).items()
    ]
    return dict(files[rank::ranks])


def save(
    directory: str | os.PathLike[str],
    scaler: GradScaler,
    group: dist.ProcessGroup | None = None,
    prints: Mapping[str, str] | None = None,
    record: Mapping[str, Any] | None = None,
) -> Path:
    """Write the scaler's state into a checkpoint's directory; called by every rank of the group.

    Call ``save`` after the framework has written its files. The scaler's file is replaced only
    when it is complete and flushed; if the process is killed before, that of an earlier save stays.

    Args:
        directory: this rank's path of the checkpoint's directory; rank 0 creates the directory.
        scaler: a ``LossScaler``, or a framework's GradScaler.
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
        record = signed(record, {name: one for prints in every for name, one in prints.items()})
    if _place(group)[0] == 0:
        try:
            write_whole(path, json.dumps(record, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            failure = (
                f"{path}: cannot write the loss scaler's state ({error.strerror or error}). A job "
                "that resumes from this checkpoint would begin with a fresh scaler; make room or "
                "give access, and save again."
            )
    raise_together(failure, group)
    return path


def load(
    directory: str | os.PathLike[str], scaler: GradScaler, files: Files | None = None
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
    where = os.path.join(directory, FILE_NAME)
    mine = Verdict(where)
    if _place()[0] == 0:
        mine = Verdict.of(partial(read_file, where), where)
    otherwise = "Or delete the file to continue with a fresh scaler."
    return _restore(scaler, _from_all(mine)[0], files, otherwise)


def restore(
    scaler: GradScaler, record: object, where: str, files: Files | None = None, otherwise: str = ""
) -> tuple[str, ...] | None:
    """Restore the scaler's state from a record in a framework's file; called by every rank.

    For the result see ``load``. The record supplies scale, growth tracker, counters and settings,
    except a growth interval or factors that the user set in this process. ``min_scale`` becomes the
    lower of the saved value and this process's value.

    Args:
        scaler: a ``LossScaler``, or a framework's GradScaler.
        record: what this rank has read: a record, a tensor of ``to_tensor``, a list of several that
            have to be of one save, or ``None``.
        where: the file, for messages.
        files: this rank's files, to compare with the files that the record names.
        otherwise: a sentence on how to continue with a fresh scaler, or empty.

    Raises:
        ScalerOfAnotherSaveError: the ``files`` and the record are from different saves.
        ScalerCheckpointError: a rank's record is damaged, or the ranks' records differ. Every rank
            raises the error, and the scaler is then unchanged.
    """

    def read(record: object) -> object:
        return from_tensor(record, where) if isinstance(record, torch.Tensor) else record

    records = record if isinstance(record, list) else [record]
    found = [Verdict.of(partial(read, one), where) for one in records] or [Verdict(where)]
    return _restore(scaler, Verdict.together(found), files, otherwise)


def _restore(
    scaler: GradScaler, mine: Verdict, files: Files | None, otherwise: str
) -> tuple[str, ...] | None:
    every = _from_all(replace(mine.beside(files), saved=None))
    verdict = Verdict.together(every)
    if verdict.damage:
        raise ScalerCheckpointError(f"{verdict.damage} {otherwise}".rstrip())
    if verdict.another:
        raise ScalerOfAnotherSaveError(verdict.another)
    if mine.saved is None:
        return None
    settings = scaler.settings if isinstance(scaler, LossScaler) else ScalerSettings()
    state, lines = choose_values(mine.saved, settings, mine.where)
    scaler.load_state_dict(state)
    if isinstance(scaler, LossScaler):
        scaler.counter.steps = mine.saved.steps
        scaler.counter.skipped = mine.saved.skipped
        scaler.counter.in_row = mine.saved.skipped_in_row
    if files is not None and mine.saved.files is None:
        line = "it does not say which files it was written with, so it is not compared with them"
        return (*lines, line)
    return lines


def raise_together(failure: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise the first failure of the ranks on all of them; every rank calls it, with its failure.

    Raises:
        ScalerCheckpointError: a rank has a failure.
    """
    failures = [text for text in _from_all(failure, group) if text]
    if failures:
        raise ScalerCheckpointError(failures[0])


def _place(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return this rank in a group (``None``: all ranks), and the group's size; else 0 and 1."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _from_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of a group, in the order of the ranks."""
    ranks = _place(group)[1]
    if ranks == 1:
        return [value]
    check_ranks(group)
    every = [None] * ranks
    dist.all_gather_object(every, value, group=group)
    return every
