"""Find out which copies of a model's weights a rollout engine has, and how each copy is rounded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..auditing.reading import SIXTEEN_BIT, Owned, Reading
from ..auditing.torch_reader import mixed_dtype
from ..precision.dtypes import name_of
from .merged import Merged
from .meters import Rollout

Chain = tuple[torch.dtype, ...]
"""The dtypes to which a number is rounded, one after the other."""

_KEPT = re.compile(r"(^|\.)((gate|router)\.[^.]+|e_score_correction_bias|A_log|dt_bias)$")
"""Matches the names of router and state-space parameters, which engines keep in fp32 for many
models, whatever the engine's dtype is."""


@dataclass(frozen=True)
class Copies:
    """A model's properties that determine the rollout engines' copies of its weights.

    Attributes:
        own: for each parameter of each group, a tuple with its 16-bit dtype in the model. ``own``
            has ``()`` for an fp32 parameter, ``None`` for a parameter without a known copy.
        otherwise: the assumed dtype of an fp32 parameter's copy if the engine's dtype is unknown.
        merged: the ``Merged`` that samples elements of the matrices into which LoRA is merged.
    """

    own: Sequence[Sequence[Chain | None]]
    otherwise: torch.dtype
    merged: Merged

    def chain(self, group: int, place: int, rollout: Rollout | None) -> Chain | None:
        """Return the dtypes that a rollout copy is rounded to, in order; ``None`` if unknown."""
        try:
            own = self.own[group][place]
        except IndexError:  # the group or parameter was added after attach()
            return None
        if own is None or (rollout is not None and (rollout.merged or not rollout.dtypes)):
            return None
        if rollout is None:
            return own or (self.otherwise,)
        chain = (*own, *rollout.dtypes)
        return tuple(b for a, b in zip((None, *chain), chain, strict=False) if a is not b)


def named(chain: Chain) -> str:
    """Name the dtypes that a copy is rounded to, the last one first, as in ``"fp16 over bf16"``."""
    return " over ".join(name_of(dtype) for dtype in reversed(chain))


def copies_of(reading: Reading, stepper: torch.optim.Optimizer, model: Any) -> Copies:
    """Return the ``Copies`` that tells how rollout engines round an optimizer's weights.

    Args:
        reading: the optimizer's ``Reading``.
        stepper: the torch optimizer within the framework's optimizer.
        model: the model's modules, or ``None``.
    """
    by_tensor = {id(parameter.stepped): parameter for parameter in reading.owned}
    in_model = {p.dtype for p in (*reading.trainable, *_parameters(model))} & set(SIXTEEN_BIT)
    if len(in_model) == 1:
        (otherwise,) = in_model
    else:  # rollout engines compute in bf16 by default
        otherwise = mixed_dtype(_chunks(model)) or torch.bfloat16
    names = ((name, p) for chunk in _chunks(model) for name, p in chunk.named_parameters())
    kept = {id(p) for name, p in names if _KEPT.search(name)}
    own = [
        [_own_dtype(by_tensor.get(id(p)), kept) for p in group["params"]]
        for group in stepper.param_groups
    ]
    return Copies(own, otherwise, Merged(_chunks(model)))


def _own_dtype(owned: Owned | None, kept: set[int]) -> Chain | None:
    if owned is None or owned.dtype is torch.float32:
        own: Chain | None = ()
    else:
        own = (owned.dtype,) if owned.dtype in SIXTEEN_BIT else None
    return None if owned is not None and id(owned.parameter) in kept else own


def _chunks(model: Any) -> list[torch.nn.Module]:
    several = model if isinstance(model, (list, tuple)) else [model]
    return [module for module in several if isinstance(module, torch.nn.Module)]


def _parameters(model: Any) -> list[torch.Tensor]:
    return [p for chunk in _chunks(model) for p in chunk.parameters() if p.requires_grad]
