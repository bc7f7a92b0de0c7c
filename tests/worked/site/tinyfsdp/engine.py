"""Shard a model, accumulate gradients, take steps, keep checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Engine:
    """A model under FSDP2 with AdamW: fp32 parameters, computed in ``config["dtype"]``."""

    def __init__(self, config: dict[str, Any], module: torch.nn.Module) -> None:
        self.config = config
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, config["dtype"]), reduce_dtype=torch.float32
        )
        self.module = fully_shard(module, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=config.get("lr", 1e-2))
        self.metrics: dict[str, float] = {}

    def compute_loss(self, batch: torch.Tensor) -> torch.Tensor:
        """The mean squared error of a model that repeats its input."""
        return (self.module(batch).float() - batch).square().mean()

    def forward_backward(self, batch: torch.Tensor, weight: float = 1.0) -> float:
        """Add the gradients of one micro-batch to those that are there."""
        loss = self.compute_loss(batch) * weight
        loss.backward()
        return loss.item()

    def clip(self) -> torch.Tensor:
        """Clip the gradients and return their norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def optim_step(self) -> dict[str, float]:
        """Clip, step, forget the gradients; returns the metrics of the step."""
        metrics = {"grad_norm": self.clip().item()}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return metrics

    def save(self, folder: str) -> None:
        """Write a distributed checkpoint of torch's."""
        model, optimizer = get_state_dict(self.module, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        """Read one."""
        model, optimizer = get_state_dict(self.module, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
