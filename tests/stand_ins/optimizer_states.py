"""Helpers for Megatron's distributed optimizer: the loss before a step, and the states after it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version

from precision_shim.precision.remainders import join_master


def loss_of_step(chunks: list[Any], optimizer: Any, seed: int) -> torch.Tensor:
    """The loss of a tiny GPT on random tokens, after the last step's gradients were cleared."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 32, (2, 9), generator=generator)
    optimizer.zero_grad()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    places = torch.arange(8).expand(2, 8)
    labels = tokens[:, 1:].contiguous()
    loss: torch.Tensor = chunks[0](tokens[:, :-1], places, None, labels=labels).mean()
    return loss


def live_states(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor, dict[str, Any]]]:
    """Each parameter with this rank's shard of its fp32 master, and its states."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter, (group, order) in one.model_param_group_index_map.items():
            shard = one.optimizer.param_groups[group]["params"][order]
            state = one.optimizer.state[shard]
            master = state.get("master_param", shard).detach()
            if master.dtype is torch.int16:
                master = join_master(shard.detach(), master)
            yield parameter, master.float().clone(), state


def reads_remainders() -> bool:
    """Whether Megatron can load remainders that it saved; 0.16 fails on its padding entry."""
    return Version(version("megatron-core")).release[:2] != (0, 16)
