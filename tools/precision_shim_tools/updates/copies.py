"""Find out in which dtypes a rollout engine has copies of a model's weights."""

from __future__ import annotations

import re
from typing import Any

import torch

from precision_shim.auditing.meters import DTYPES, Rollout
from precision_shim.auditing.reading import SIXTEEN_BIT, Reading
from precision_shim.auditing.torch_reader import mixed_dtype

_KEPT = re.compile(r"(^|\.)((gate|router)\.[^.]+|e_score_correction_bias|A_log|dt_bias)$")
"""Matches the names of router and state-space parameters, which engines keep in fp32 for many
models, whatever the engine's dtype is."""

_FACTOR = re.compile(r"lora_|\.adapter\.")
"""Matches the names of LoRA's factors."""


class Copies:
    """The dtypes of the rollout engines' copies of the weights that one torch optimizer updates."""

    def __init__(self, reading: Reading, model: Any) -> None:
        several = model if isinstance(model, (list, tuple)) else [model]
        modules = [module for module in several if isinstance(module, torch.nn.Module)]
        named = [(name, p) for module in modules for name, p in module.named_parameters()]
        in_model = {p.dtype for p in reading.trainable}
        in_model |= {p.dtype for _, p in named if p.requires_grad}
        in_model &= set(SIXTEEN_BIT)
        # Rollout engines compute in bf16 by default.
        assumed = mixed_dtype(modules) or torch.bfloat16
        self._assumed = Rollout(in_model.pop() if len(in_model) == 1 else assumed)
        names = {id(p): name for name, p in named}
        # Without the model, or if most of it is frozen, the trained parameters may be factors of
        # LoRA under any name.
        sizes = [p.numel() if p.requires_grad else -p.numel() for _, p in named]
        self._whole = sum(sizes) > 0
        # torch cannot move a parameter of FSDP2 to which there are weak references; the strong ones
        # keep the ids valid.
        self._own = {
            id(its.stepped): (its.stepped, its.dtype, names.get(id(its.parameter), ""))
            for its in reading.owned
        }

    def dtype(self, stepped: torch.Tensor, rollout: Rollout | None) -> torch.dtype | None:
        """Return the dtype of a parameter's (or master's) copy; ``None`` if unknown, or no copy.

        ``rollout`` is what an adapter or the user said about the copies.
        """
        told = rollout or self._assumed
        _, own, name = self._own.get(id(stepped), (stepped, stepped.dtype, ""))
        if told.dtype is None or own not in DTYPES or _KEPT.search(name):
            return None
        if not told.factors and (_FACTOR.search(name) or not self._whole):
            return None
        return next(dtype for dtype in DTYPES if dtype in (own, told.dtype))
