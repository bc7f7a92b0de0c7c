"""The gradient buffers of Megatron's DDPs, found without importing Megatron."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def grad_buffers(chunks: Iterable[Any]) -> Iterator[Any]:
    """Yield the buffers of the chunks' DDPs, with the buffers of expert-parallel parameters."""
    for chunk in chunks:
        for name in ("buffers", "expert_parallel_buffers"):
            buffers = getattr(chunk, name, None)
            # ``buffers`` is a method of torch's Module, but a list of Megatron's DDP.
            if isinstance(buffers, (list, tuple)):
                yield from buffers
