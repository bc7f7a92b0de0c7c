"""Compute the changes that an optimizer's step would make to a sample without rounding.

A rule evaluates the optimizer's own formula in fp64, from the stored weights, the stored states and
the gradients that the optimizer reads at a step. There are rules for Adam and AdamW (torch's,
TransformerEngine's and Apex's) and for torch's SGD. There is no rule for a subclass with its own
``step``, because the subclass's formula is not known.

No function of this module synchronizes with a GPU; a learning rate in a GPU tensor stays a tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..auditing.reading import local
from ..precision.dtypes import name_of
from ..precision.remainders import join_master

_SCALED = (torch.float16, torch.uint8)
"""The dtypes of states that FusedAdam stores divided by a scale."""


class UnknownRuleError(Exception):
    """There is no rule for an optimizer; the message is a sentence for the user."""


@dataclass
class Sampled:
    """A sample of one group's elements in fp64; all fields have the same length.

    Attributes:
        weights: the stored weights.
        gradient: the gradient that the optimizer reads.
        states: the stored states by name; zeros for a state that the first step will create.
        steps: for each element, its parameter's step count, including the coming step.
    """

    weights: torch.Tensor
    gradient: torch.Tensor
    states: dict[str, torch.Tensor]
    steps: torch.Tensor


@dataclass
class Ideal:
    """The changes that one step would make without rounding.

    Attributes:
        update: change of the weights.
        exp_avg_sq: change of the second moment; ``None`` without a second moment.
    """

    update: torch.Tensor
    exp_avg_sq: torch.Tensor | None = None


def _adam(sampled: Sampled, group: Mapping[str, Any], decoupled: bool) -> Ideal:
    beta1, beta2 = group["betas"]
    decay, gradient = group["weight_decay"], sampled.gradient
    if group.get("maximize"):
        gradient = -gradient
    if not decoupled:
        gradient = gradient + decay * sampled.weights
    first, second = sampled.states["exp_avg"], sampled.states["exp_avg_sq"]
    moved = (1 - beta2) * (gradient * gradient - second)
    first, second = first + (1 - beta1) * (gradient - first), second + moved
    if group.get("amsgrad"):
        second = torch.maximum(second, sampled.states["max_exp_avg_sq"])
    if group.get("bias_correction", True):
        first = first / (1 - beta1**sampled.steps)
        second = second / (1 - beta2**sampled.steps)
    update = first / (second.sqrt() + group["eps"])
    if decoupled:
        update = update + decay * sampled.weights
    return Ideal(-group["lr"] * update, moved)


def _sgd(sampled: Sampled, group: Mapping[str, Any], decoupled: bool) -> Ideal:
    gradient = -sampled.gradient if group.get("maximize") else sampled.gradient
    gradient = gradient + group["weight_decay"] * sampled.weights
    if group["momentum"]:
        kept = sampled.states["momentum_buffer"] * group["momentum"]
        # torch's SGD does not dampen the gradient in the first step.
        begun = (1 - group["dampening"]) * gradient
        buffer = kept + torch.where(sampled.steps > 1, begun, gradient)
        gradient = gradient + group["momentum"] * buffer if group["nesterov"] else buffer
    return Ideal(-group["lr"] * gradient)


class Rule:
    """How one optimizer stores its numbers, and how a step changes them.

    Args:
        optimizer: a torch optimizer.

    Raises:
        UnknownRuleError: there is no rule for the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        step = inspect.unwrap(type(optimizer).step)
        place = f"{step.__module__}:{step.__qualname__}"
        self._fused = step.__qualname__ == "FusedAdam.step" and hasattr(optimizer, "adam_w_mode")
        known: dict[str, Callable[..., Ideal]] = {
            "torch.optim.adam:Adam.step": _adam,
            "torch.optim.adamw:AdamW.step": _adam,
            "torch.optim.sgd:SGD.step": _sgd,
        }
        ideal = _adam if self._fused else known.get(place)
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
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], sampled: Sampled
    ) -> Ideal:
        """Return the changes that the coming step would make to a sample without rounding."""
        return self._ideal(sampled, group, self._is_decoupled(optimizer, group))

    def _is_decoupled(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
        if self._fused:
            return bool(optimizer.adam_w_mode)  # type: ignore[attr-defined]
        return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))

    def gradient(self, optimizer: Any, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient that the coming step reads; ``None`` if it is absent or sparse."""
        decoupled = self._fused and getattr(optimizer, "use_decoupled_grad", False)
        gradient = getattr(parameter, "decoupled_grad", None) if decoupled else parameter.grad
        return None if gradient is None or gradient.is_sparse else gradient

    def steps_ever(self, optimizer: Any, parameter: torch.Tensor) -> bool:
        """Whether the optimizer updates a parameter at any step; false for a frozen parameter.

        Megatron's masters require no gradient, but Megatron sets their gradient before each step.
        """
        if parameter.requires_grad or optimizer.state.get(parameter):
            return True
        return self.gradient(optimizer, parameter) is not None

    def states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the states that the rule reads."""
        if self._ideal is _sgd:
            return ("momentum_buffer",) if group["momentum"] else ()
        more = ("max_exp_avg_sq",) if group.get("amsgrad") else ()
        return ("exp_avg", "exp_avg_sq", *more)

    def state(
        self, optimizer: Any, parameter: torch.Tensor, name: str, at: Taken
    ) -> torch.Tensor | None:
        """Return a sample of a state; ``None`` before the first step, which creates the state."""
        value = optimizer.state.get(parameter, {}).get(name)
        if value is None:
            return None
        if self._scaled.get(name) in _SCALED:
            value = optimizer.get_unscaled_state(parameter, name)
        return at(value)

    def steps(
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

    def weights(self, optimizer: Any, parameter: torch.Tensor, at: Taken) -> torch.Tensor:
        """Return a sample in fp64 of the weights that the optimizer updates (masters, if any)."""
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


class Taken:
    """Samples a parameter, its gradient and its states at the same positions.

    Args:
        indices: positions of the elements in this rank's shard; ``None`` for all elements.
        count: number of sampled elements.
    """

    def __init__(self, indices: torch.Tensor | None, count: int) -> None:
        self.indices, self.count = indices, count

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the sampled elements of a tensor, in the tensor's dtype."""
        flat = local(tensor).detach().reshape(-1)
        return flat.clone() if self.indices is None else flat.index_select(0, self.indices)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sampled elements in fp64, which represents all smaller dtypes exactly."""
        return self.raw(tensor).double()

    def ones(self, like: torch.Tensor) -> torch.Tensor:
        """Return ones in fp64, one per sampled element, on the device of ``like``."""
        return torch.ones(self.count, dtype=torch.float64, device=local(like).device)
