"""Choose the files of torch's distributed checkpoint to list in each rank's loss scaler record."""

from __future__ import annotations

from pathlib import Path

import torch

from precision_shim.precision.belonging import files_beneath
from precision_shim.scaling import Files


def files_of_rank(path: str, *, written: bool = False) -> Files:
    """Return this rank's share of the files of a distributed checkpoint.

    Args:
        path: the checkpoint's directory; the files may be in a subdirectory.
        written: whether to return only the files that this rank wrote; other ranks' files may not
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
