"""Read ``.metadata``, which lists the tensors of torch's distributed checkpoints, as plain data.

Seams use this module to read a checkpoint before the framework loads it. Unlike torch's reader,
this module does not unpickle the file: the module imports and calls nothing that the file names,
and needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO

from ..errors import CheckpointUnreadableError
from .pickles import Made, Name, read_pickle
from .tensors import dtype_name

__all__ = ["NAME", "Stored", "read_entries"]

NAME = ".metadata"
"""Name of the metadata file in a checkpoint's directory."""

_METADATA = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True)
class Stored:
    """The entry of one key in a checkpoint.

    Attributes:
        dtype: canonical name of a tensor's dtype; ``None`` for an object that is no tensor.
        shape: shape of a tensor.
    """

    dtype: str | None
    shape: tuple[int, ...] = ()


def read_entries(source: bytes | IO[bytes], where: str) -> dict[str, Stored]:
    """Read the entries of all keys in a checkpoint.

    Args:
        source: the content of the checkpoint's ``.metadata``, or the open file.
        where: the file, for messages.

    Raises:
        CheckpointUnreadableError: the file is incomplete, or is not a checkpoint's metadata.
    """
    metadata = read_pickle(source, where)
    if not isinstance(metadata, Made) or metadata.kind != f"{_METADATA}.Metadata":
        raise CheckpointUnreadableError(
            f"{where}: a pickle, but not the metadata of a distributed checkpoint."
        )
    try:
        return {
            key: _read_entry(entry) for key, entry in metadata.get("state_dict_metadata").items()
        }
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointUnreadableError(
            f"{where}: the metadata of a distributed checkpoint in a form that is not known "
            f"({type(error).__name__}: {error})."
        ) from None


def _read_entry(made: Made) -> Stored:
    if made.kind != f"{_METADATA}.TensorStorageMetadata":
        return Stored(None)
    state = made.get("properties").state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    shape = made.get("size")
    if not isinstance(dtype, Name) or not isinstance(shape, tuple):
        raise ValueError("a tensor has no dtype or shape")
    return Stored(dtype_name(dtype.path), tuple(int(size) for size in shape))
