"""A trainer on Megatron's own objects, with the call orders of trainers that ask first.

slime and miles need ``megatron.training``, which is in no wheel. So their ``train_one_step`` is
written down here: the calls that it makes on Megatron's objects, in its order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..audit import builds

SCALE = 1024.0
OVERFLOW = 1e30


def fp16(
    *, scale: float | None = SCALE, fp32_bucket: bool = True, experts: bool = False, **config: Any
) -> builds.Build:
    """An fp16 model; without a scale Megatron's own first scale."""
    if scale is not None:
        config["initial_loss_scale"] = scale
    return builds.Build(
        builds.FP16, fp32_bucket=fp32_bucket, experts=experts, config={"clip_grad": 1.0, **config}
    )


@dataclass
class Trainer:
    """One model, its optimizer, and the way in which it steps."""

    chunks: list[Any]
    optimizer: Any

    @classmethod
    def of(cls, build: builds.Build) -> Trainer:
        """Build model and optimizer."""
        chunks, optimizer = builds.make(build)
        return cls(chunks, optimizer)

    def backward(self, number: int, weight: float = 1.0, *, scaled: bool = True) -> float:
        """Gradients of the batch of that number, as all these trainers make them."""
        (model,) = self.chunks
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 32, (4, 8), generator=generator)
        model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = model(tokens, torch.arange(8).expand(4, 8), None, labels=tokens).float().mean()
        weighted = loss * weight
        (self.optimizer.scale_loss(weighted) if scaled else weighted).backward()
        model.finish_grad_sync()
        return float(loss)

    def plain(self, number: int, weight: float = 1.0) -> float:
        """A step of Megatron's own; returns its norm, NaN where it was skipped."""
        self.backward(number, weight)
        successful, norm, _ = self.optimizer.step()
        return float(norm) if successful else math.nan

    def asking(self, number: int, weight: float = 1.0) -> float:
        """A step as slime and miles make it: they ask for an overflow, and leave ``step`` out."""
        self.backward(number, weight)
        if self.optimizer.prepare_grads():
            self.optimizer.zero_grad()
            return math.nan
        successful, norm, _ = self.optimizer.step()
        assert successful
        return float(norm)

    @property
    def scalers(self) -> list[Any]:
        """The loss scalers of all optimizers."""
        each = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [one.grad_scaler for one in each]

    def parameters(self) -> list[torch.Tensor]:
        """Copies of the live parameters."""
        return [one.detach().clone() for one in self.chunks[0].parameters()]
