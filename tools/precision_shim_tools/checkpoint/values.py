"""Apply the shim's rules for loading a checkpoint to a sample of the checkpoint's values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from precision_shim.precision.remainders import looks_like_remainders, rounds_exactly

from .tensors import Tensor

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes of which values are read."""

_MOST = 64 << 20
"""Maximum number of bytes that are read of a component; a smaller component is read whole."""

_PIECES = 512
"""Maximum number of pieces that are read: every piece is a separate read of a file."""

_ALIGNED = 64
"""Megatron aligns each parameter in a bucket to a multiple of this many elements. Megatron also
stores the padding between parameters, in pieces with fewer elements than this."""


def samples(tensors: Sequence[Tensor]) -> Iterator[torch.Tensor]:
    """Yield the first values of at most ``_PIECES`` pieces of the tensors.

    Small pieces, and dtypes other than fp32, bf16 and fp16, are skipped.
    """
    least = _ALIGNED if any(tensor.elements >= _ALIGNED for tensor in tensors) else 1
    pieces = [
        (_DTYPES[tensor.dtype], part)
        for tensor in tensors
        if tensor.dtype in _DTYPES
        for part in tensor.parts
    ]
    chosen = pieces[:: -(-len(pieces) // _PIECES) or 1]
    share = _MOST // max(1, len(chosen)) // 8 * 8  # a whole number of elements
    for dtype, part in chosen:
        content = part(share)
        if len(content) >= least * dtype.itemsize:
            yield torch.frombuffer(bytearray(content), dtype=dtype)


def are_bf16(tensors: Sequence[Tensor]) -> bool:
    """Whether bf16 represents every value of a sample exactly; false if no value can be read."""
    seen = False
    for value in samples(tensors):
        if not rounds_exactly(value, torch.bfloat16):
            return False
        seen = True
    return seen


def are_numbers(masters: Sequence[Tensor]) -> bool | None:
    """Whether fp32 masters are remainders (int16 low bits); ``None`` if no value can be read.

    A model may have masters that are all 0 or all 1, such as those of norms, beside others.
    """
    seen = changed = False
    for value in samples(masters):
        if value.dtype is torch.float32:
            if looks_like_remainders(value, partial(value.clamp, -1.0, 1.0)):
                return True
            seen, changed = True, changed or bool(value.any())
    return not changed if seen else None
