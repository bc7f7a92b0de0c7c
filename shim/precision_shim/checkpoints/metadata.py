"""What torch's distributed checkpoints say of their tensors: ``.metadata``, read as plain data.

For the seams that look at a checkpoint before the framework loads it. torch's own reader unpickles
the file; here nothing that it names is imported or called. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO

from ..errors import CheckpointUnreadableError
from .pickles import Made, Name, read_pickle
from .tensors import dtype_name

__all__ = ["NAME", "Stored", "stored"]

NAME = ".metadata"
"""The file's name in a checkpoint's directory."""

_METADATA = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True)
class Stored:
    """What a checkpoint has under a key.

    Attributes:
        dtype: a tensor's, as this project writes it; ``None`` for what is no tensor.
        shape: a tensor's.
    """

    dtype: str | None
    shape: tuple[int, ...] = ()


def stored(source: bytes | IO[bytes], where: str) -> dict[str, Stored]:
    """What a checkpoint has, by its keys.

    Args:
        source: the content of its ``.metadata``, or the open file.
        where: the file, for messages.

    Raises:
        CheckpointUnreadableError: it is no such file, or not whole.
    """
    metadata = read_pickle(source, where)
    if not isinstance(metadata, Made) or metadata.kind != f"{_METADATA}.Metadata":
        raise CheckpointUnreadableError(
            f"{where}: a pickle, but not the metadata of a distributed checkpoint."
        )
    try:
        return {key: _stored(one) for key, one in metadata.get("state_dict_metadata").items()}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointUnreadableError(
            f"{where}: the metadata of a distributed checkpoint in a form that is not known "
            f"({type(error).__name__}: {error})."
        ) from None


def _stored(one: Made) -> Stored:
    if one.kind != f"{_METADATA}.TensorStorageMetadata":
        return Stored(None)
    state = one.get("properties").state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    shape = one.get("size")
    if not isinstance(dtype, Name) or not isinstance(shape, tuple):
        raise ValueError("a tensor has no dtype or shape")
    return Stored(dtype_name(dtype.path), tuple(int(size) for size in shape))
