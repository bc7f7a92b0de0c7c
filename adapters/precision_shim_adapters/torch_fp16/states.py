"""An optimizer's states: make those that a checkpoint needs, and refuse moments in fp16."""

from __future__ import annotations

import torch
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam

from precision_shim.precision.moments import eps_is_zero_in_fp16
from precision_shim.scaling import states_of_no_step

_ADAMS = (Adam, AdamW, NAdam, RAdam)


def make_missing_states(optimizer: Optimizer) -> None:
    """Make an optimizer's missing states with step count 0; torch's checkpoint would set 1.

    Call this function before a save: an optimizer whose steps were all skipped has no states.
    """
    if not optimizer.state:
        from torch.distributed.checkpoint.state_dict import _init_optim_state

        states_of_no_step(optimizer, lambda: _init_optim_state(optimizer))


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
