"""Compute the changes that an optimizer's step would make to a sample without rounding.

A rule evaluates in fp64 the formula of Adam and AdamW (torch's, TransformerEngine's, Apex's) or of
torch's SGD. A subclass with its own ``step`` has no rule. No function here synchronizes with a GPU;
a learning rate in a GPU tensor stays a tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from precision_shim.auditing.reading import local
from precision_shim.precision.dtypes import name_of
from precision_shim.precision.remainders import join_master

from .sampling import Taken, Tensors

_SCALED = (torch.float16, torch.uint8)
"""The dtypes of states that FusedAdam stores divided by a scale."""


class UnknownRuleError(Exception):
    """There is no rule for an optimizer; the message is a sentence for the user."""


class StoredState(NamedTuple):
    """The stored numbers of a sample in fp64; all tensors have the same length.

    ``weights`` are the masters if there are any. ``states`` has zeros for a state that the first
    step will create.
    """

    weights: torch.Tensor
    states: dict[str, torch.Tensor]


class Ideal(NamedTuple):
    """The changes of weights and second moment (if any) by one step without rounding."""

    update: torch.Tensor
    exp_avg_sq: torch.Tensor | None = None


def _adam(
    stored: StoredState, gradient: torch.Tensor, steps: torch.Tensor, group: Mapping[str, Any]
) -> Ideal:
    beta1, beta2 = group["betas"]
    decay = group["weight_decay"] * stored.weights
    if not group["decoupled_weight_decay"]:
        gradient = gradient + decay
    first, second = stored.states["exp_avg"], stored.states["exp_avg_sq"]
    moved = (1 - beta2) * (gradient * gradient - second)
    first, second = first + (1 - beta1) * (gradient - first), second + moved
    if group.get("amsgrad"):
        second = torch.maximum(second, stored.states["max_exp_avg_sq"])
    if group.get("bias_correction", True):
        first = first / (1 - beta1**steps)
        second = second / (1 - beta2**steps)
    update = first / (second.sqrt() + group["eps"])
    if group["decoupled_weight_decay"]:
        update = update + decay
    return Ideal(-group["lr"] * update, moved)


def _sgd(
    stored: StoredState, gradient: torch.Tensor, steps: torch.Tensor, group: Mapping[str, Any]
) -> Ideal:
    gradient = gradient + group["weight_decay"] * stored.weights
    if group["momentum"]:
        kept = stored.states["momentum_buffer"] * group["momentum"]
        # torch's SGD does not dampen the gradient in the first step.
        begun = (1 - group["dampening"]) * gradient
        buffer = kept + torch.where(steps > 1, begun, gradient)
        gradient = gradient + group["momentum"] * buffer if group["nesterov"] else buffer
    return Ideal(-group["lr"] * gradient)


class Rule:
    """How one torch optimizer stores its numbers, and how a step changes them.

    Raises:
        UnknownRuleError: there is no rule for the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        step = inspect.unwrap(type(optimizer).step)
        self._fused = step.__qualname__ == "FusedAdam.step" and hasattr(optimizer, "adam_w_mode")
        known: dict[str, Callable[..., Ideal]] = {
            "torch.optim.adam:Adam.step": _adam,
            "torch.optim.adamw:AdamW.step": _adam,
            "torch.optim.sgd:SGD.step": _sgd,
        }
        ideal = _adam if self._fused else known.get(f"{step.__module__}:{step.__qualname__}")
        self._scaled: Mapping[str, torch.dtype] = getattr(optimizer, "name_to_dtype_map", {})
        if self._fused and not self._scaled and getattr(optimizer, "master_weights", False):
            ideal = None  # Apex's FusedAdam does not store its masters in its state
        if ideal is None:
            raise UnknownRuleError(
                f"{type(optimizer).__module__}.{type(optimizer).__qualname__} has a rule of its "
                "own, by which precision_shim cannot tell which of its updates are lost; known "
                "are Adam and AdamW (torch, TransformerEngine, Apex) and torch's SGD."
            )
        self._ideal = ideal

    def ideal(
        self, optimizer: Any, group: Mapping[str, Any], tensors: Tensors, stored: StoredState
    ) -> Ideal:
        """Return the changes that the coming step would make to a sample without rounding."""
        gradients = [at(self.gradient(optimizer, p)) for p, at in tensors]  # type: ignore[arg-type]
        gradient = torch.cat(gradients)
        scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler for a fused step
        if scale is not None:
            gradient = gradient / scale
        if group.get("maximize"):
            gradient = -gradient
        steps = torch.cat([self._steps(optimizer, group, p, at) for p, at in tensors])
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        decoupled = optimizer.adam_w_mode if self._fused else decoupled
        group = {**group, "decoupled_weight_decay": decoupled}
        return self._ideal(stored, gradient, steps, group)

    def gradient(self, optimizer: Any, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient that the coming step reads; ``None`` if it is absent or sparse."""
        decoupled = self._fused and getattr(optimizer, "use_decoupled_grad", False)
        gradient = getattr(parameter, "decoupled_grad", None) if decoupled else parameter.grad
        return None if gradient is None or gradient.is_sparse else gradient

    def read(self, optimizer: Any, group: Mapping[str, Any], tensors: Tensors) -> StoredState:
        """Return the stored numbers of a sample."""
        if self._ideal is _sgd:
            names = ["momentum_buffer"] if group["momentum"] else []
        else:
            names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group.get("amsgrad"))
        return StoredState(
            torch.cat([self._weights(optimizer, p, at) for p, at in tensors]),
            {
                name: torch.cat([self._state(optimizer, p, name, at) for p, at in tensors])
                for name in names
            },
        )

    def _state(self, optimizer: Any, parameter: torch.Tensor, name: str, at: Taken) -> torch.Tensor:
        value = optimizer.state.get(parameter, {}).get(name)
        if value is None:
            return 0 * at.ones(parameter)
        if self._scaled.get(name) in _SCALED:
            value = optimizer.get_unscaled_state(parameter, name)
        return at(value)

    def _steps(
        self, optimizer: Any, group: Mapping[str, Any], parameter: torch.Tensor, at: Taken
    ) -> torch.Tensor:
        """Return a parameter's step count, including the coming step, for each sampled element."""
        state = optimizer.state.get(parameter, {})
        if self._ideal is _sgd:  # SGD counts no steps; its rule only detects the first step
            made: Any = int(state.get("momentum_buffer") is not None)
        else:
            made = group.get("step", 0) if self._fused else state.get("step", 0)
        if isinstance(made, torch.Tensor):
            made = local(made).reshape(())
        counted: torch.Tensor = at.ones(parameter) * made + 1
        return counted

    def _weights(self, optimizer: Any, parameter: torch.Tensor, at: Taken) -> torch.Tensor:
        kept = self._master(optimizer, parameter)
        master = optimizer.state.get(parameter, {}).get("master_param") if kept else None
        if master is None:
            return at(parameter)
        if kept == "remainder":
            return join_master(at.raw(parameter), at.raw(master)).double()
        return at(optimizer.get_unscaled_state(parameter, "master_param"))

    def stored(self, optimizer: Any, parameter: torch.Tensor) -> str:
        """Return how a parameter's weights are stored, such as ``"bf16+int16"``."""
        kept = self._master(optimizer, parameter)
        if kept == "remainder":
            return "bf16+int16"
        return name_of(optimizer.master_weight_dtype if kept else parameter.dtype)

    def _master(self, optimizer: Any, parameter: torch.Tensor) -> str:
        # FusedAdam also makes a master for an fp32 parameter, but never updates that master.
        if not self._fused or parameter.dtype is torch.float32:
            return ""
        if not getattr(optimizer, "master_weights", False):
            return ""
        remainders = getattr(optimizer, "store_param_remainders", False)
        return "remainder" if remainders and parameter.dtype is torch.bfloat16 else "whole"
