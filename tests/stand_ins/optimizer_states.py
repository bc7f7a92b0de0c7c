"""Helpers for Megatron's distributed optimizer: the loss before a step, and the states after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def step_on_made_up_gradients(chunks: list[Any], optimizer: Any) -> None:
    """Take a step as a trainer does, without a forward and a backward."""
    for chunk in chunks:
        for buffer in chunk.buffers:
            buffer.grad_data.normal_(std=1e-2)
    optimizer.get_loss_scale()  # called whenever a loss is scaled
    optimizer.step()


def inner_states(optimizer: Any) -> list[dict[str, Any]]:
    """The states of each parameter, as torch's optimizers within Megatron's have them."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [state for one in chained for state in one.optimizer.state.values()]


def dtypes_after_step(chunks: list[Any], optimizer: Any) -> dict[str, torch.dtype]:
    """Take a step; returns the dtype of each kind of state that has only one."""
    step_on_made_up_gradients(chunks, optimizer)
    found: dict[str, set[torch.dtype]] = {}
    for state in inner_states(optimizer):
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                found.setdefault(name, set()).add(value.dtype)
    return {name: dtypes.pop() for name, dtypes in found.items() if len(dtypes) == 1}


def hold_masters_to_moments(
    optimizer: Any,
    moves: list[tuple[int, str]],
    offload: Callable[[Any], None],
    load: Callable[[Any], None],
) -> None:
    """A framework moves the masters of a precision-aware optimizer with the moments, and back."""

    def masters() -> set[int]:
        return {id(state["master_param"]) for state in inner_states(optimizer)}

    kept = masters()
    assert kept
    del moves[:]
    offload(optimizer)
    assert kept <= {tensor for tensor, where in moves if where == "cpu"}
    back = masters()
    del moves[:]
    load(optimizer)
    assert back <= {tensor for tensor, _ in moves}


def reads_remainders() -> bool:
    """Whether Megatron can load remainders that it saved; 0.16 fails on its padding entry."""
    return Version(version("megatron-core")).release[:2] != (0, 16)
