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
        quantized: whether trainable parameters are stored in fp8 or fp4. TransformerEngine's
            quantized tensors have a wider nominal ``dtype``, such as bf16.
    """

    counts: Mapping[torch.dtype, int] = field(default_factory=dict)
    quantized: bool = False

    @property
    def single(self) -> torch.dtype | None:
        """The dtype of all trainable parameters; ``None`` for several, quantized or none."""
        return next(iter(self.counts)) if len(self.counts) == 1 and not self.quantized else None

    def __add__(self, other: TrainableDtypes) -> TrainableDtypes:
        return TrainableDtypes(
            dict(Counter(self.counts) + Counter(other.counts)), self.quantized or other.quantized
        )

    def __str__(self) -> str:
        parts = [f"{name_of(dtype)}: {count:,}" for dtype, count in self.counts.items()]
        return ("fp8 or fp4 parameters; " if self.quantized else "") + ", ".join(parts or ["none"])


def trainable_dtypes(parameters: Iterable[Any]) -> TrainableDtypes:
    """Count the trainable elements of parameters by dtype."""
    counts: Counter[torch.dtype] = Counter()
    quantized = False
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        counts[parameter.dtype] += parameter.numel()
        # TransformerEngine's quantized tensors have another nominal dtype; a group wraps bytes.
        held = getattr(parameter, "rowwise_data", None)
        quantized |= (parameter if held is None else held).dtype.itemsize == 1
        quantized |= hasattr(parameter, "_fp8_dtype") or hasattr(parameter, "_fp4_dtype")
    return TrainableDtypes(dict(counts), quantized)
