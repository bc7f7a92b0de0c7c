"""Builds, trains and saves a GPT with Megatron's DDP and distributed optimizer."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Config:
    """The user's settings, as in a YAML file."""

    precision: str = "bfloat16"
    lr: float = 1e-3
    sharding: str = "dp_reshardable"
    """Megatron's sharding type for the optimizer's state in a checkpoint."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's OptimizerConfig."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's DistributedDataParallelConfig."""


class Trainer:
    """One model and its optimizer."""

    def __init__(self, config: Config, provider: Any, device: str) -> None:
        self.config = config
        self.provider = provider
        self.device = device
        self.build()

    def build(self) -> None:
        """Build the model, then the optimizer."""
        self.model = wrap_model(self.config, self.provider, self.device)
        self.optimizer = make_optimizer(optimizer_config(self.config), self.model)

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits of the next byte, ``[batch, position, byte]``."""
        result: torch.Tensor = self.model(inputs, *positions_and_mask(inputs))
        return result

    def forward_backward(self, tokens: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """Fill the gradient buckets; return the loss, a tensor on the device, in nats per byte.

        Args:
            tokens: ``[batch, length + 1]``.
            weight: factor of the loss in the backward pass.
        """
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(inputs, *positions_and_mask(inputs), labels=labels).float().mean()
        self.optimizer.scale_loss(loss * weight).backward()
        self.model.finish_grad_sync()
        value: torch.Tensor = loss.detach()
        return value

    def update(self) -> dict[str, float]:
        """Run the optimizer's step, and return the gradient norm."""
        successful, grad_norm, _ = self.optimizer.step()
        if not successful:
            raise RuntimeError("the optimizer's step failed")
        return {"grad_norm": float(grad_norm)}

    def train_step(self, tokens: torch.Tensor, weight: float = 1.0) -> dict[str, float]:
        """Run a forward pass, a backward pass and a step; return loss and gradient norm."""
        loss = self.forward_backward(tokens, weight)
        return {"loss": float(loss), **self.update()}

    def save(self, folder: str) -> None:
        """Write a checkpoint with Megatron's distributed checkpointing."""
        from megatron.core import dist_checkpointing

        os.makedirs(folder, exist_ok=True)
        state, metadata = self._state(is_loading=False)
        dist_checkpointing.save(state, folder, content_metadata=metadata)

    def load(self, folder: str) -> None:
        """Load a checkpoint into the model, then into the optimizer."""
        from megatron.core import dist_checkpointing

        wanted, _ = self._state(is_loading=True)
        state = dist_checkpointing.load(wanted, folder)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _state(self, is_loading: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        from megatron.core import mpu

        metadata: dict[str, Any] = {
            "distrib_optim_sharding_type": self.config.sharding,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
        if self.config.sharding == "fully_reshardable":
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        state = {
            "model": self.model.module.sharded_state_dict(
                metadata={**metadata, "dp_cp_group": group}
            )
        }
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
        return state, metadata


def positions_and_mask(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Position ids and attention mask for Megatron's GPT; true in the mask hides a position."""
    length = inputs.shape[1]
    positions = torch.arange(length, device=inputs.device).expand_as(inputs)
    square = torch.ones(1, 1, length, length, dtype=torch.bool, device=inputs.device)
    return positions, square.triu(1)


def wrap_model(config: Config, provider: Any, device: str) -> Any:
    """Put a model into Megatron's DDP, which allocates the gradient buckets."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    module = provider().to(device)
    if config.precision != "float32":
        module = Float16Module(provider.config, module)
    ddp = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, **config.ddp}
    return DistributedDataParallel(provider.config, DistributedDataParallelConfig(**ddp), module)


def optimizer_config(config: Config) -> Any:
    """Make Megatron's OptimizerConfig."""
    from megatron.core.optimizer import OptimizerConfig

    fields = {
        "optimizer": "adam",
        "lr": config.lr,
        "bf16": config.precision == "bfloat16",
        "fp16": config.precision == "float16",
        "params_dtype": getattr(torch, config.precision),
        "use_distributed_optimizer": True,
        **config.optimizer,
    }
    return OptimizerConfig(**fields)


def make_optimizer(config: Any, model: Any) -> Any:
    """Make Megatron's optimizer from its config and a model in DDP."""
    from megatron.core.optimizer import get_megatron_optimizer

    return get_megatron_optimizer(config, [model])
