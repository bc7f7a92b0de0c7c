"""The states of an optimizer that has taken no step, as a checkpoint needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def make_missing_states(optimizer: Optimizer) -> None:
    """Make the states that torch's distributed checkpoint is about to make, with a step count of 0.

    Call it before such a save: where each step up to now was skipped, there are no states.

    Args:
        optimizer: a scaled training's optimizer.
    """
    if not optimizer.state:
        from torch.distributed.checkpoint.state_dict import _init_optim_state

        states_of_no_step(optimizer, lambda: _init_optim_state(optimizer))


def states_of_no_step(optimizer: Optimizer, initialize: Callable[[], Any]) -> Any:
    """Make the states of an optimizer that has none, with a step count of 0.

    torch's distributed checkpoint and torchtitan make missing states by a step on zero gradients.
    They count that step, and make no states where gradients are set. So a checkpoint that is saved
    while every step so far was skipped could not be resumed exactly, or not loaded at all.

    Args:
        optimizer: an optimizer without states.
        initialize: makes the states.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for one in parameters:
        one.grad = None
    try:
        result = initialize()
    finally:
        for one, gradient in zip(parameters, gradients, strict=True):
            one.grad = gradient
    for state in optimizer.state.values():
        count = state.get("step")
        if isinstance(count, torch.Tensor):
            count.zero_()
        elif count is not None:
            state["step"] = 0
    return result
