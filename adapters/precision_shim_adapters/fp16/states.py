"""An optimizer's states: make those that a checkpoint needs, and refuse moments in fp16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam

from precision_shim.precision.moments import eps_is_zero_in_fp16

_ADAMS = (Adam, AdamW, NAdam, RAdam)


def make_missing_states(optimizer: Optimizer) -> None:
    """Make an optimizer's missing states with step count 0; torch's checkpoint would set 1.

    Call this function before a save: an optimizer whose steps were all skipped has no states.

    Args:
        optimizer: the optimizer of a ``ScaledTraining``.
    """
    if not optimizer.state:
        from torch.distributed.checkpoint.state_dict import _init_optim_state

        states_of_no_step(optimizer, lambda: _init_optim_state(optimizer))


def states_of_no_step(optimizer: Optimizer, initialize: Callable[[], Any]) -> Any:
    """Make the states of an optimizer without states, with a step count of 0.

    To make missing states, torch's distributed checkpoint and torchtitan step on zero gradients;
    the step counts are then 1. If parameters have gradients, torch and torchtitan make no states.
    Without this function, a checkpoint that is saved after only skipped steps would not resume
    exactly, or would not load.

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


def fault_of_eps(name: str, eps: float) -> str:
    """Why an Adam optimizer cannot step fp16 parameters that have no master; empty if it can."""
    if not eps_is_zero_in_fp16(eps):
        return ""
    return (
        f"{name} keeps the moments of fp16 parameters in fp16, where its eps of {eps:g} is 0, so "
        "that a step divides by 0 and weights become infinite"
    )


def fault_of_moments(optimizer: Optimizer) -> str:
    """Why torch's optimizer cannot step its fp16 parameters; empty if it can, or is not known.

    A fused optimizer computes a step in fp32.
    """
    if not isinstance(optimizer, _ADAMS):
        return ""
    faults = (
        fault_of_eps(type(optimizer).__name__, group["eps"])
        for group in optimizer.param_groups
        if not group.get("fused")
        and any(one.requires_grad and one.dtype is torch.float16 for one in group["params"])
    )
    return next(filter(None, faults), "")
