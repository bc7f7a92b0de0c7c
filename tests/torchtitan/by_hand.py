"""The loops that a user would write: torch's own scaler around torchtitan's parts.

The loops use torchtitan's model, loss, clipping, optimizers and LR schedulers, but none of the
methods that the tests compare. Attention runs in float16 in the loops, as it does with the shim,
so only the scaling code differs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from . import cpu


def scaler(scale: float, interval: int) -> ShardedGradScaler:
    return ShardedGradScaler(device="cpu", init_scale=scale, growth_interval=interval)


class _Scaled:
    """The innermost loss, times the loss scale."""

    def __init__(self, loss: Any, scaler: ShardedGradScaler) -> None:
        self.loss, self.scaler, self.values = loss, scaler, []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss, metrics = self.loss(*args, **kwargs)
        return self.scaler.scale(loss), metrics


@contextmanager
def _scaled(trainer: Any, scaler: ShardedGradScaler) -> Iterator[None]:
    from torchtitan.components.loss import ChunkedLossWrapper

    owner = trainer.loss_fn if isinstance(trainer.loss_fn, ChunkedLossWrapper) else trainer
    own = owner.loss_fn
    owner.loss_fn = _Scaled(own, scaler)
    try:
        yield
    finally:
        owner.loss_fn = own


@contextmanager
def attention_in_float16() -> Iterator[None]:
    """Remove torchtitan's cast in the attention of a trainer that is built in this block."""
    from torchtitan.models.common.attention import VarlenAttention

    own = VarlenAttention.forward

    @functools.wraps(own)
    def forward(self: Any, q: Any, k: Any, v: Any, *, attention_masks: Any, **options: Any) -> Any:
        shape, head = q.shape, q.shape[-1]  # (rows, tokens, heads, head), or without rows
        tokens = shape[:-2].numel()
        packed = [one.reshape(tokens, -1, head) for one in (q, k, v)]
        found = cpu.varlen_by_sdpa(
            *packed,
            attention_masks.cu_seq_q,
            attention_masks.cu_seq_k,
            attention_masks.max_q,
            attention_masks.max_k,
            scale=options.get("scale"),
            window_size=self.window_size,
            enable_gqa=options.get("enable_gqa", False),
        )
        return found.view(shape).to(q.dtype)

    VarlenAttention.forward = forward
    try:
        yield
    finally:
        VarlenAttention.forward = own


def _step(trainer: Any, scaler: ShardedGradScaler) -> tuple[float, float]:
    """Unscale, clip, step or skip, update; returns the grad norm and the step's loss scale."""
    from torchtitan.distributed import utils

    scale = scaler.get_scale()
    parameters = [one for part in trainer.model_parts for one in part.parameters()]
    for optimizer in trainer.optimizers:
        scaler.unscale_(optimizer)
    norm = utils.clip_grad_norm_(parameters, trainer.config.training.max_norm, foreach=True)
    for optimizer in trainer.optimizers:
        scaler.step(optimizer)
    scaler.update()
    trainer.lr_schedulers.step()
    return float(norm), scale


def policy_step(
    trainer: Any, scaler: ShardedGradScaler, step: int, advantage: float
) -> tuple[float, float, float]:
    """Three passes and a step; returns grad norm, the step's scale, and the last unscaled loss."""
    model = trainer.model
    with _scaled(trainer, scaler):
        for part in range(3):
            batch = cpu.microbatch(1000 * step + 10 * part, advantage=advantage)
            masks = model.get_attention_masks(batch.positions)
            with trainer.train_context():
                pred = model(batch.token_ids, attention_masks=masks, positions=batch.positions)
                loss, metrics = trainer.loss_fn(
                    pred,
                    batch.labels,
                    3 * 2 * cpu.LENGTH,
                    generator_logprobs=batch.generator_logprobs,
                    advantages=batch.advantages,
                    loss_mask=batch.loss_mask,
                )
                loss.backward()
    norm, scale = _step(trainer, scaler)
    trainer.optimizers.zero_grad()
    return norm, scale, float(metrics["loss/mean"])


def train_step(trainer: Any, scaler: ShardedGradScaler, data: Any) -> tuple[float, float, float]:
    """A ``Trainer``'s accumulation steps and a step; returns norm, scale, and the scaled loss."""
    trainer.optimizers.zero_grad()
    batches = [next(data) for _ in range(trainer.gradient_accumulation_steps)]
    tokens = torch.tensor(sum(labels.numel() for _, labels in batches))
    model, total = trainer.model_parts[0], torch.zeros(())
    with _scaled(trainer, scaler):
        for inputs, labels in batches:
            positions = inputs["positions"]
            masks = model.get_attention_masks(positions)
            with trainer.train_context():
                pred = model(inputs["input"], attention_masks=masks, positions=positions)
                loss, _ = trainer.loss_fn(pred, labels, tokens, positions=positions)
                loss.backward()
            total = total + loss.detach()
    norm, scale = _step(trainer, scaler)
    return norm, scale, float(total)
