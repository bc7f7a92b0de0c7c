"""Create the states that Megatron optimizers need in order to be saved before their first step.

Delete this module when Megatron can save an optimizer that has no states yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from precision_shim.scaling import states_of_no_step


def make_states(optimizers: Iterable[Any]) -> None:
    """Create the states of single Megatron optimizers that have never stepped.

    Megatron cannot save an optimizer without states, so a job whose first steps are all skipped
    would fail at its first checkpoint. (Without CPU offload, this function skips torch's Adam,
    whose checkpoints Megatron cannot load anyway.)
    """
    for unchained in optimizers:
        inner = getattr(unchained, "optimizer", None)
        if inner is None or inner.state:
            continue
        # Only Megatron's optimizer for CPU offload has ``sub_optimizers``.
        parts = getattr(inner, "sub_optimizers", None)
        for part in [inner] if parts is None else parts:
            _make_states_of(part, on_host=parts is not None)
        if parts is not None:
            inner._sync_sub_optimizers_state_to_hdo()


def _make_states_of(inner: Any, *, on_host: bool) -> None:
    make = getattr(inner, "initialize_state", None)  # FusedAdam's step calls initialize_state
    params = [param for group in inner.param_groups for param in group["params"]]
    if make is not None:
        # Up to TransformerEngine 2.0, the parameter is the only argument of ``initialize_state``.
        two = "store_param_remainders" in inspect.signature(make).parameters
        kept = bool(getattr(inner, "store_param_remainders", False))
        for param in params:
            make(*(param, kept and param.dtype is torch.bfloat16) if two else (param,))
    elif on_host:
        states_of_no_step(inner, partial(_step_on_zeros, inner, params))


def _step_on_zeros(inner: Any, params: list[torch.Tensor]) -> None:
    rates = [group["lr"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = 0.0  # with lr 0, weight decay changes no parameter
    for param in params:
        param.grad = torch.zeros_like(param)
    inner.step()
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate
