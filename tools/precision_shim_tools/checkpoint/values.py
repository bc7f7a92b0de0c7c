"""Apply the shim's rules for loading a checkpoint to a sample of the checkpoint's values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from precision_shim.precision.continuing import NARROWER
from precision_shim.precision.remainders import looks_like_remainders, rounds_exactly

from .layout import MASTER, PARAMS, CheckpointPart
from .tensors import Tensor, item_size

__all__ = ["are_numbers", "narrower", "samples"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes of which values are read."""

_LEAST = 64 << 10
"""Minimum number of bytes to read from each piece of a tensor."""

_PIECES = 512
"""Maximum number of pieces that are read: every piece is a separate archive to open."""

_ALIGNED = 64
"""Megatron aligns each parameter in a bucket to a multiple of this many elements. Megatron also
stores the padding between parameters, in pieces with fewer elements than this."""


def samples(tensors: Sequence[Tensor], most: int) -> Iterator[tuple[Tensor, int, torch.Tensor]]:
    """Yield the first values of at most ``_PIECES`` pieces of the tensors.

    Args:
        tensors: the tensors; small pieces, and dtypes other than fp32, bf16 and fp16, are skipped.
        most: maximum number of bytes that are read, over all tensors.

    Yields:
        Each item has the tensor, the piece's number, and the piece's first values.
    """
    full = any(tensor.elements >= _ALIGNED for tensor in tensors)
    pieces = [
        (tensor, number)
        for tensor in tensors
        if tensor.dtype in _DTYPES
        for number in range(len(tensor.parts))
    ]
    chosen = pieces[:: -(-len(pieces) // _PIECES) or 1]
    share = max(_LEAST, most // max(1, len(chosen)) // 8 * 8)  # a whole number of elements
    for sampled, number in chosen:
        content = sampled.parts[number](share)
        if content and (len(content) // item_size(sampled.dtype) >= _ALIGNED or not full):
            value = torch.frombuffer(bytearray(content), dtype=_DTYPES[sampled.dtype])
            yield sampled, number, value


def narrower(tensors: Sequence[Tensor], most: int) -> tuple[str, ...]:
    """Return the narrower dtypes that represent every value of a sample exactly."""
    fits: list[str] | None = None
    for _, _, value in samples(tensors, most):
        left = NARROWER if fits is None else fits
        fits = [name for name in left if rounds_exactly(value, _DTYPES[name])]
        if not fits:
            break
    return tuple(fits or ())


def are_numbers(part: CheckpointPart, most: int) -> bool | None:
    """Whether fp32 masters are remainders (int16 low bits); ``None`` if no value can be read."""
    weights = {tensor.name.removeprefix("model."): tensor for tensor in part.held.get(PARAMS, ())}
    seen = False
    for tensor, number, value in samples(part.held[MASTER], most):
        if tensor.dtype != "fp32":
            continue

        if looks_like_remainders(value, partial(_param_of, weights, tensor, number, value)):
            return True
        seen = True
    return False if seen else None


def _param_of(
    weights: dict[str, Tensor], tensor: Tensor, number: int, value: torch.Tensor
) -> torch.Tensor:
    """Return the values of a master's parameter, or a substitute if the checkpoint lacks them."""
    weight = weights.get(tensor.name.partition("param.")[2])
    if weight is not None and len(weight.parts) == len(tensor.parts):
        content = weight.parts[number](value.numel() * item_size(weight.dtype))
        if weight.dtype in _DTYPES and len(content) == value.numel() * item_size(weight.dtype):
            return torch.frombuffer(bytearray(content), dtype=_DTYPES[weight.dtype])
    # With this result, looks_like_remainders is true if all masters are whole and some exceed 1.
    return value.clamp(-1.0, 1.0)
