"""Save beside other jobs: a framework's files move into place whole, with the scaler's record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from precision_shim import scaling
from precision_shim.precision.belonging import files_beneath
from precision_shim.scaling import Files

from .training import ScaledTraining


def files_of_rank(directories: Mapping[str, str]) -> Files:
    """Return this rank's share of a checkpoint's files; for ``directories`` see ``SaveAside``."""
    rank, ranks = 0, 1
    if torch.distributed.is_initialized():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    files = [
        item for name, place in directories.items() for item in files_beneath(place, name).items()
    ]
    return dict(files[rank::ranks])


@contextmanager
def saved_aside(
    training: ScaledTraining, place: str, directories: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Yield the directories to save into; then move the files, and write the scaler's state.

    Every rank calls ``saved_aside``. ``place`` is the directory of the scaler's file; for
    ``directories`` see ``SaveAside``.
    """
    with scaling.SaveAside(directories, None) as save:
        yield save.places
    training.save(place, prints=save.prints)


def save_after(
    saved: Future[Any], training: ScaledTraining, place: str, save: scaling.SaveAside, group: Any
) -> Future[Any]:
    """Finish ``save`` with the scaler's present state when a save in the background has ended.

    Every rank calls ``save_after``. ``group`` is a process group of all ranks, for nothing else
    until the returned future, which replaces ``saved``, has ended.
    """
    record, ended = scaling.record_of(training.scaler), Future[Any]()

    def end(saved: Future[Any]) -> None:
        try:
            result = saved.result()
            save.publish(group)
            training.save(place, group, save.prints, record)
        except BaseException as error:  # ``ended`` raises the error
            ended.set_exception(error)
        else:
            ended.set_result(result)

    saved.add_done_callback(end)
    return ended
