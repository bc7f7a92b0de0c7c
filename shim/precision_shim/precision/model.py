"""Count a live model's trainable elements by dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .dtypes import name_of


@dataclass(frozen=True)
class TrainableDtypes:
    """Numbers of trainable elements by dtype; frozen parameters (LoRA's base) are not counted.

    Attributes:
        counts: number of trainable elements by dtype.
        fp8: whether trainable parameters are stored in fp8. TransformerEngine's fp8 tensors have a
            wider nominal ``dtype``, such as bf16.
    """

    counts: Mapping[torch.dtype, int] = field(default_factory=dict)
    fp8: bool = False

    @property
    def single(self) -> torch.dtype | None:
        """The dtype of all trainable parameters; ``None`` for several, fp8 or no parameters."""
        return next(iter(self.counts)) if len(self.counts) == 1 and not self.fp8 else None

    def __add__(self, other: TrainableDtypes) -> TrainableDtypes:
        return TrainableDtypes(
            dict(Counter(self.counts) + Counter(other.counts)), self.fp8 or other.fp8
        )

    def __str__(self) -> str:
        parts = [f"{name_of(dtype)}: {count:,}" for dtype, count in self.counts.items()]
        return ("fp8 parameters; " if self.fp8 else "") + ", ".join(parts or ["none"])


def trainable_dtypes(parameters: Iterable[Any]) -> TrainableDtypes:
    """Count the trainable elements of parameters by dtype."""
    counts: Counter[torch.dtype] = Counter()
    fp8 = False
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        counts[parameter.dtype] += parameter.numel()
        # Transformer Engine's quantized tensors have fp8 data but another nominal dtype.
        fp8 = fp8 or parameter.dtype.itemsize == 1 or hasattr(parameter, "_fp8_dtype")
    return TrainableDtypes(dict(counts), fp8)
