"""Read ``.metadata``, which lists the tensors of torch's distributed checkpoints, as plain data.

Unlike torch's reader, this module runs nothing that the file names, and needs no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import IO

from ..errors import CheckpointUnreadableError
from ..precision.names import SHORT
from .pickles import Made, read_pickle

METADATA = ".metadata"
"""Name of the metadata file in a checkpoint's directory."""

_METADATA = "torch.distributed.checkpoint.metadata"


@lru_cache
def dtype_name(path: str) -> str:
    """Return a dtype's canonical name: ``"fp32"`` for ``"torch.float32"``.

    Raises:
        ValueError: ``path`` does not name a dtype.
    """
    bare = path.removeprefix("torch.")
    if not re.fullmatch(r"[A-Za-z_]\w{0,31}", bare, re.ASCII):
        raise ValueError(f"{bare[:32]!r} is no dtype")
    return SHORT.get(bare, bare)


@dataclass(frozen=True)
class StoredTensor:
    """The entry of one key; ``dtype`` is ``None`` for an object that is no tensor."""

    dtype: str | None
    shape: tuple[int, ...] = ()


def read_metadata(source: bytes | IO[bytes], where: str) -> tuple[Made, dict[str, StoredTensor]]:
    """Read a checkpoint's metadata from ``.metadata``, and the entries of all keys.

    Raises:
        CheckpointUnreadableError: the file is incomplete, or is not a checkpoint's metadata.
    """
    metadata = read_pickle(source, where)
    if not isinstance(metadata, Made) or metadata.kind != f"{_METADATA}.Metadata":
        raise CheckpointUnreadableError(
            f"{where}: a pickle, but not the metadata of a distributed checkpoint."
        )
    try:
        entries = metadata.get("state_dict_metadata").items()
        return metadata, {key: _read_entry(entry) for key, entry in entries}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointUnreadableError(
            f"{where}: the metadata of a distributed checkpoint in a form that is not known "
            f"({type(error).__name__}: {error})."
        ) from None


def _read_entry(made: Made) -> StoredTensor:
    if made.kind != f"{_METADATA}.TensorStorageMetadata":
        return StoredTensor(None)
    state = made.get("properties").state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    return StoredTensor(dtype_name(dtype.kind), tuple(int(size) for size in made.get("size")))
