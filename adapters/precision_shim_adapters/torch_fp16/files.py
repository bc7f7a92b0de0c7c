"""Choose the files of torch's distributed checkpoint to list in each rank's loss scaler record."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from precision_shim import scaling
from precision_shim.precision.belonging import files_beneath
from precision_shim.scaling import Files

from .training import ScaledTraining


def files_of_rank(path: str, *, written: bool = False) -> Files:
    """Return this rank's share of the files in a distributed checkpoint's directory or below.

    ``written`` restricts the files to those that this rank wrote, since other ranks' files may not
    be visible yet.
    """
    rank, ranks = 0, 1
    if torch.distributed.is_initialized():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    files = files_beneath(path)
    if not written:
        return dict(list(files.items())[rank::ranks])
    mine = (f"__{rank}_", ".metadata") if rank == 0 else (f"__{rank}_",)
    return {name: place for name, place in files.items() if Path(name).name.startswith(mine)}


def save_after(saved: Future[Any], training: ScaledTraining, path: str, group: Any) -> Future[Any]:
    """Write the scaler's present state when a save in the background has ended.

    Every rank calls ``save_after``. ``group`` is a process group of all ranks, for nothing else
    until the returned future, which replaces ``saved``, has ended.
    """
    record, ended = scaling.record_of(training.scaler), Future[Any]()

    def end(saved: Future[Any]) -> None:
        try:
            result = saved.result()
            files = files_of_rank(path, written=True)
            training.write(lambda: scaling.save_record(path, record, group, files))
        except BaseException as error:  # ``ended`` raises the error
            ended.set_exception(error)
        else:
            ended.set_result(result)

    saved.add_done_callback(end)
    return ended
