"""Take Megatron's DDPs and chained optimizers apart, without importing Megatron."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def grad_buffers(chunks: Iterable[Any]) -> Iterator[Any]:
    """Yield the gradient buffers of DDPs, including the buffers of expert-parallel parameters."""
    for chunk in chunks:
        for name in ("buffers", "expert_parallel_buffers"):
            buffers = getattr(chunk, name, None)
            # In torch's Module ``buffers`` is a method, but in Megatron's DDP it is a list.
            if isinstance(buffers, (list, tuple)):
                yield from buffers


def unchain(optimizer: Any) -> list[Any]:
    """The optimizers in a chain and in the chains within it, or the optimizer itself."""
    if not hasattr(optimizer, "chained_optimizers"):
        return [optimizer]
    return [leaf for inner in optimizer.chained_optimizers for leaf in unchain(inner)]
