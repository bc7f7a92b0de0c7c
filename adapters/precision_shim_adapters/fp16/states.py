"""The states of an optimizer that has taken no step, as a checkpoint needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def states_of_no_step(optimizer: Optimizer, initialize: Callable[[], Any]) -> Any:
    """Make the states of an optimizer that has none, with a step count of 0.

    torch's distributed checkpoint and torchtitan make missing states by a step on zero gradients.
    They count that step, and make no states where gradients are set. So a checkpoint that is saved
    while every step so far was skipped could not be resumed exactly, or not loaded at all.

    Args:
        optimizer: an optimizer without states.
        initialize: makes the states.
    """
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in parameters]
    for param in parameters:
        param.grad = None
    try:
        result = initialize()
    finally:
        for param, gradient in zip(parameters, gradients, strict=True):
            param.grad = gradient
    for state in optimizer.state.values():
        count = state.get("step")
        if isinstance(count, torch.Tensor):
            count.zero_()
        elif count is not None:
            state["step"] = 0
    return result
