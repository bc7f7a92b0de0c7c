"""Build, train, save and load a tiny GPT with Megatron's own code."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from precision_shim_tools.testing import tiny_gpt

_PRECISION_AWARE: dict[str, Any] = {
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": torch.bfloat16,
    "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.bfloat16,
}

# mode: dtype of the parameters, whether the bucket is fp32, fields of the OptimizerConfig
MODES: dict[str, tuple[torch.dtype, bool, dict[str, Any]]] = {
    "plain": (torch.bfloat16, True, {}),
    "plain-bf16-bucket": (torch.bfloat16, False, {}),
    "remainders": (torch.bfloat16, False, _PRECISION_AWARE),
    "remainders-fp32-bucket": (torch.bfloat16, True, _PRECISION_AWARE),
    "no-remainders": (torch.bfloat16, False, _PRECISION_AWARE | {"store_param_remainders": False}),
    "fp8-moments": (
        torch.bfloat16,
        False,
        _PRECISION_AWARE | {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    ),
    "fp16": (torch.float16, True, {"initial_loss_scale": 1024.0}),
    "fp32": (torch.float32, True, {}),
    "moe": (torch.bfloat16, False, _PRECISION_AWARE),
}


def build(mode: str, *, seed: int = 0) -> tuple[list[Any], Any]:
    """DDP chunks and the Megatron optimizer over them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    dtype, fp32_bucket, extra = MODES[mode]
    provider = tiny_gpt(dtype, num_moe_experts=2 if mode == "moe" else None)
    config = provider.config  # type: ignore[attr-defined]
    torch.manual_seed(seed)
    model = provider()
    if dtype != torch.float32:
        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=fp32_bucket
    )
    chunks = [DistributedDataParallel(config, ddp_config, model)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            **extra,
        ),
        chunks,
    )
    return chunks, optimizer


def train(
    chunks: list[Any], optimizer: Any, steps: int, *, first: int = 0, world: int = 1, rank: int = 0
) -> list[float]:
    """Train on the batch of each step; every rank takes its share of the batch."""
    losses = []
    (model,) = chunks
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 32, (4, 8), generator=generator).chunk(world)[rank]
        positions = torch.arange(8).expand(tokens.shape[0], 8)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens, positions, None, labels=tokens).float().mean()
        optimizer.scale_loss(loss).backward()
        model.finish_grad_sync()
        optimizer.step()
        value = loss.detach().clone()
        torch.distributed.all_reduce(value)
        losses.append(value.item() / world)
    return losses


def _model_part(chunks: list[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import mpu

    group = mpu.get_data_parallel_group(with_context_parallel=True)
    return {
        "model": chunks[0].module.sharded_state_dict(metadata=metadata | {"dp_cp_group": group})
    }


def save(chunks: list[Any], optimizer: Any, path: Path, sharding: str) -> None:
    """As verl's MegatronCheckpointManager saves."""
    from megatron.core import dist_checkpointing

    metadata = {
        "distrib_optim_sharding_type": sharding,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    state = _model_part(chunks, metadata)
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=False, metadata=metadata)
    path.mkdir(parents=True, exist_ok=True)
    arguments: dict[str, Any] = {}
    if "content_metadata" in inspect.signature(dist_checkpointing.save).parameters:
        arguments["content_metadata"] = metadata
    dist_checkpointing.save(state, str(path), **arguments)


def load(chunks: list[Any], optimizer: Any, path: Path) -> None:
    """Load as verl's MegatronCheckpointManager does: the model first, then the optimizer."""
    from megatron.core import dist_checkpointing

    metadata = dist_checkpointing.load_content_metadata(checkpoint_dir=str(path))
    state = _model_part(chunks, metadata)
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load(state, str(path))
    chunks[0].load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
