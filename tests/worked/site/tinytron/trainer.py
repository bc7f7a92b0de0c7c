"""Build a GPT under Megatron's DDP and distributed optimizer, train it, keep it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Config:
    """What a user writes in a YAML file."""

    precision: str = "bfloat16"
    lr: float = 1e-2
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's OptimizerConfig."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's DistributedDataParallelConfig."""


class Trainer:
    """One model and its optimizer."""

    def __init__(self, config: Config, provider: Any) -> None:
        self.config = config
        self.provider = provider
        self.build()

    def build(self) -> None:
        """Build the model, then the optimizer."""
        self.model = wrap_model(self.config, self.provider)
        self.optimizer = make_optimizer(optimizer_config(self.config), self.model)

    def train_step(self, tokens: torch.Tensor, weight: float = 1.0) -> dict[str, float]:
        """One forward pass, one backward pass, one step of the optimizer."""
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(tokens, positions, None, labels=tokens).float().mean()
        self.optimizer.scale_loss(loss * weight).backward()
        self.model.finish_grad_sync()
        successful, grad_norm, _ = self.optimizer.step()
        if not successful:
            raise RuntimeError("the optimizer's step failed")
        return {"loss": loss.item(), "grad_norm": float(grad_norm)}

    def save(self, folder: str) -> None:
        """Write a distributed checkpoint of Megatron's."""
        from megatron.core import dist_checkpointing

        os.makedirs(folder, exist_ok=True)
        dist_checkpointing.save(self._state(is_loading=False), folder)

    def load(self, folder: str) -> None:
        """Read one."""
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self._state(is_loading=True), folder)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _state(self, is_loading: bool) -> dict[str, Any]:
        sharding = {"distrib_optim_sharding_type": "dp_reshardable"}
        state = {"model": self.model.module.sharded_state_dict(metadata=sharding)}
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=sharding
        )
        return state


def wrap_model(config: Config, provider: Any) -> Any:
    """Put a model into Megatron's DDP, which makes its gradient buckets."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    module = provider()
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
    """Make Megatron's optimizer of a config and a model in its DDP."""
    from megatron.core.optimizer import get_megatron_optimizer

    return get_megatron_optimizer(config, [model])
