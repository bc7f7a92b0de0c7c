"""Steps Megatron's own objects in the call orders of trainers that check for an overflow first.

slime and miles need ``megatron.training``, which no wheel contains. This module repeats the calls
that slime's and miles' ``train_one_step`` makes on Megatron's objects, in the same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..audit import builds

SCALE = 1024.0
OVERFLOW = 1e30


def fp16(*, scale: float | None = SCALE, fp32_bucket: bool = True, **config: Any) -> builds.Build:
    """A build of an fp16 model; with ``scale=None`` it has Megatron's own first scale."""
    if scale is not None:
        config["initial_loss_scale"] = scale
    return builds.Build(builds.FP16, fp32_bucket=fp32_bucket, config={"clip_grad": 1.0, **config})


@dataclass
class Trainer:
    """A model, its optimizer, and the two ways to step them."""

    chunks: list[Any]
    optimizer: Any

    @classmethod
    def of(cls, build: builds.Build, parts: int = 1) -> Trainer:
        """Build one model, or a model of several parts whose optimizers are chained."""
        from megatron.core.optimizer import ChainedOptimizer

        made = [builds.make(build, seed) for seed in range(parts)]
        inner = [one for _, optimizer in made for one in optimizer.chained_optimizers]
        return cls([chunk for chunks, _ in made for chunk in chunks], ChainedOptimizer(inner))

    def backward(self, number: int, weight: float = 1.0, *, scaled: bool = True) -> float:
        """Make the gradients of batch ``number``, as all these trainers do."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 32, (4, 8), generator=generator)
        positions = torch.arange(8).expand(4, 8)
        for model in self.chunks:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = [one(tokens, positions, None, labels=tokens) for one in self.chunks]
        # An overflow of one part counts for all parts.
        losses[-1] = losses[-1] * weight
        loss = torch.stack([one.float().mean() for one in losses]).sum()
        (self.optimizer.scale_loss(loss) if scaled else loss).backward()
        for model in self.chunks:
            model.finish_grad_sync()
        return float(loss)

    def plain(self, number: int, weight: float = 1.0) -> float:
        """Take a step as Megatron does; returns its norm, or NaN if it was skipped."""
        self.backward(number, weight)
        successful, norm, _ = self.optimizer.step()
        return float(norm) if successful else math.nan

    def asking(self, number: int, weight: float = 1.0) -> float:
        """Step as slime and miles do: if there is an overflow, they do not call ``step``."""
        self.backward(number, weight)
        if self.optimizer.prepare_grads():
            self.optimizer.zero_grad()
            return math.nan
        successful, norm, _ = self.optimizer.step()
        assert successful
        return float(norm)

    @property
    def scalers(self) -> list[Any]:
        return [one.grad_scaler for one in self.optimizer.chained_optimizers]

    def parameters(self) -> list[torch.Tensor]:
        return [one.detach().clone() for chunk in self.chunks for one in chunk.parameters()]
