"""An independent Adam with low-precision states, with which the dry run compares the stand-in.

A GPU's compiler may contract a product and a sum into one rounding; this module always contracts
them. Products and sums are computed in fp64, where products are exact, and sums rounded to fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

FP32, FP8 = torch.float32, torch.float8_e4m3fn


class AdamByHand:
    """Adam with the part of FusedAdam's interface that the comparison needs."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        master_weights: bool,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        master_weight_dtype: torch.dtype = FP32,
        store_param_remainders: bool = False,
        eps: float = 1e-8,
    ) -> None:
        self.params = list(params)
        self.state: dict[Any, dict[str, torch.Tensor]] = {}
        self._numbers = [_fp32(one) for one in (*betas, lr, eps, weight_decay)]
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        if master_weights:
            self._dtypes["master_param"] = master_weight_dtype
        self._remainders = master_weights and store_param_remainders
        self._count = 0

    def get_unscaled_state(self, param: torch.nn.Parameter, name: str) -> torch.Tensor:
        """Return a state in fp32; for a remainder, the lower half of the master's bits."""
        value = self.state[param][name]
        if name == "master_param" and self._short(param):
            return (value.view(torch.int32) & 0xFFFF).to(torch.int16)
        return value

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        self._count += 1
        for param in self.params:
            self._step(param)

    def _short(self, param: torch.nn.Parameter) -> bool:
        return self._remainders and param.dtype is torch.bfloat16

    def _step(self, param: torch.nn.Parameter) -> None:
        if param not in self.state:
            # An fp32 parameter also gets a master, as in FusedAdam, but no step reads that master.
            self.state[param] = {name: torch.zeros_like(param, dtype=FP32) for name in self._dtypes}
            if "master_param" in self._dtypes:
                self._keep(param, "master_param", param.detach().float())
        state = self.state[param]
        has_master = "master_param" in state and param.dtype is not FP32
        value = state["master_param"] if has_master else param.detach().float()
        assert param.grad is not None
        value, first, second = self._adam(value, param.grad.float(), state)
        self._keep(param, "exp_avg", first)
        self._keep(param, "exp_avg_sq", second)
        if has_master:
            self._keep(param, "master_param", value)
        param.copy_(_half_up(value) if self._short(param) else value)

    def _adam(
        self, value: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        beta1, beta2, lr, eps, decay = self._numbers
        correction1, correction2 = (_fp32(1 - beta**self._count) for beta in (beta1, beta2))
        first = _fused(beta1, state["exp_avg"], _fp32(1 - beta1) * grad)
        second = _fused(beta2, state["exp_avg_sq"], _fp32(1 - beta2) * grad * grad)
        update = (first / correction1) / ((second / correction2).sqrt() + eps)
        return _fused(-lr, _fused(decay, value, update), value), first, second

    def _keep(self, param: torch.nn.Parameter, name: str, value: torch.Tensor) -> None:
        dtype = self._dtypes[name]
        if name == "master_param" and self._short(param):
            dtype = FP32
        self.state[param][name] = _rounded(value, dtype)


def _fused(factor: float, value: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
    return (factor * value.double() + summand.double()).float()


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp32 numbers to a state's dtype, and convert them back to fp32."""
    if dtype is FP32:
        return value.clone()
    if dtype is torch.bfloat16:
        return value.bfloat16().float()
    kept = torch.float16 if dtype is torch.float16 else FP8
    largest = torch.finfo(kept).max / (2 if kept is torch.float16 else 1)
    scale = value.abs().max() / largest
    if not scale:
        return torch.zeros_like(value)
    return (value * scale.reciprocal()).to(kept).float() * scale


def _half_up(value: torch.Tensor) -> torch.Tensor:
    """Round fp32 masters to bf16, ties away from zero: a remainder is a master's lower 16 bits."""
    bits = value.view(torch.int32)
    return ((bits + 0x8000) & ~0xFFFF).view(FP32).bfloat16()


def _fp32(number: float) -> float:
    return float(torch.tensor(number, dtype=FP32))
