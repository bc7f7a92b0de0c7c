"""Real Megatron models and optimizers, honest ones and those whose config lies."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from precision_shim.testing import tiny_gpt

from ..testing.tiny_training import train

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PRECISION_AWARE: dict[str, Any] = {
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": BF16,
    "exp_avg_dtype": BF16,
    "exp_avg_sq_dtype": BF16,
}
WHOLE = PRECISION_AWARE | {"store_param_remainders": False}


@dataclass
class Build:
    """How a model and its optimizer are made.

    Attributes:
        dtype: of the parameters.
        fp32_bucket: the DDP's ``grad_reduce_in_fp32``.
        config: fields of the OptimizerConfig.
        later: fields that are set on it once it is finished.
        distributed: whether the distributed optimizer is used.
        flags: what the config says of the model; ``None``: what it is.
        experts: whether it is a mixture of experts.
    """

    dtype: torch.dtype = BF16
    fp32_bucket: bool = True
    config: dict[str, Any] = field(default_factory=dict)
    later: dict[str, Any] = field(default_factory=dict)
    distributed: bool = True
    flags: torch.dtype | None = None
    experts: bool = False


HONEST = {
    "bf16, as Megatron has it": Build(),
    "precision-aware": Build(fp32_bucket=False, config=PRECISION_AWARE),
    "precision-aware, whole masters": Build(fp32_bucket=False, config=WHOLE),
    "precision-aware, fp32 main grads": Build(config=PRECISION_AWARE | {"main_grads_dtype": FP32}),
    "precision-aware, fp32 moments": Build(
        fp32_bucket=False,
        config={"use_precision_aware_optimizer": True, "main_grads_dtype": BF16},
    ),
    "fp8 moments": Build(
        fp32_bucket=False,
        config=PRECISION_AWARE | {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    ),
    "fp16": Build(FP16, config={"initial_loss_scale": 1024.0}),
    "fp16, precision-aware": Build(
        FP16,
        config={
            "use_precision_aware_optimizer": True,
            "store_param_remainders": False,
            "initial_loss_scale": 1024.0,
        },
    ),
    "fp32": Build(FP32),
    "bf16, not distributed": Build(distributed=False),
    "fp32, not distributed": Build(FP32, distributed=False),
    "bf16 with a constant loss scale": Build(config={"loss_scale": 128.0}),
    # "bf16: true" beside 'params_dtype: "float32"', as NeMo-RL's YAMLs have it.
    "the flag and not params_dtype": Build(config={"params_dtype": FP32}),
}

NEMO_RL = Build(
    fp32_bucket=False,
    config={"use_precision_aware_optimizer": True, "params_dtype": FP32, "adam_beta2": 0.999},
)
"""examples/configs/grpo_math_1B_megatron.yaml of NeMo-RL 0.7, its optimizer and its DDP."""

AREAL = Build(
    config={"adam_beta2": 0.999},
    later={
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": FP32,
        "main_params_dtype": FP32,
        "exp_avg_dtype": BF16,
        "exp_avg_sq_dtype": BF16,
    },
)
"""areal/engine/megatron_engine.py of AReaL 1.0.4 with optimizer.type=adam_bf16: it sets the fields
on a finished config."""

PLANTED = {
    "main-grads-dtype": Build(fp32_bucket=False),
    "main-grads-dtype, precision-aware": Build(config=PRECISION_AWARE),
    "main-grads-dtype, NeMo-RL": NEMO_RL,
    # The optimizer was made before.
    "moment-dtype": Build(
        fp32_bucket=False, config=PRECISION_AWARE | {"exp_avg_sq_dtype": FP32, "adam_beta2": 0.95}
    ),
    "master-missing": Build(distributed=False, flags=FP32),
    "master-dtype": AREAL,
    "params-dtype": Build(FP32, flags=BF16),
    "scaler-missing": Build(FP16, flags=BF16),
}
"""Problem to a build that has it."""

EIGHT = {
    "plain": Build(),
    "precision-aware, remainders": Build(fp32_bucket=False, config=PRECISION_AWARE),
    "precision-aware, whole masters": Build(fp32_bucket=False, config=WHOLE),
    "fp16": Build(FP16, config={"initial_loss_scale": 1024.0}),
}
"""Each on a dense model and on one with experts, which makes eight."""


def with_experts(build: Build, experts: bool = True) -> Build:
    """A build of a mixture of experts, or as it is."""
    return replace(build, experts=experts)


def make(build: Build, seed: int = 0) -> tuple[list[Any], Any]:
    """DDP chunks and Megatron's optimizer over them."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    parallel: dict[str, Any] = {}
    if build.experts:
        from megatron.core import parallel_state

        size = parallel_state.get_expert_model_parallel_world_size()
        parallel = {"num_moe_experts": 2, "expert_model_parallel_size": size}
    provider = tiny_gpt(build.dtype, **parallel)
    config = provider.config  # type: ignore[attr-defined]
    torch.manual_seed(seed)
    model = provider()
    if build.dtype is not FP32:
        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=build.distributed, grad_reduce_in_fp32=build.fp32_bucket
    )
    chunks = [DistributedDataParallel(config, ddp_config, model)]
    flags = build.flags or build.dtype
    fields = {
        "optimizer": "adam",
        "lr": 1e-2,
        "bf16": flags is BF16,
        "fp16": flags is FP16,
        "params_dtype": flags,
        "use_distributed_optimizer": build.distributed,
        "adam_beta2": 0.95,
        **build.config,
    }
    optimizer_config = OptimizerConfig(**fields)
    for name, value in build.later.items():
        setattr(optimizer_config, name, value)
    return chunks, get_megatron_optimizer(optimizer_config, chunks)


def plant(code: str, optimizer: Any) -> None:
    """What no config can bring about."""
    if code == "moment-dtype":
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            one.config.exp_avg_sq_dtype = BF16


def step(chunks: list[Any], optimizer: Any, *, world: int = 1, rank: int = 0) -> None:
    """One step; its gradients are left where they are."""
    train(chunks, optimizer, 1, world=world, rank=rank)


def step_without_forward(chunks: list[Any], optimizer: Any) -> None:
    """One step on gradients that are put into the bucket; no activation is left behind."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(0.125)
    optimizer.step()


# -- all that lives ----------------------------------------------------------------------------


def live_storages() -> dict[int, int]:
    """Identity and size of the storage of every tensor that the process holds."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        # test_torch.py keeps a lazy module, whose parameters have no storage yet.
        if issubclass(type(one), torch.Tensor) and not is_lazy(one):
            storage = getattr(one, "_local_tensor", one).untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def held_by(build: Build) -> tuple[int, list[Any], Any]:
    """Bytes of the storages that come into being with a model and its first step, and live on."""
    before = live_storages()
    chunks, optimizer = make(build)
    step_without_forward(chunks, optimizer)
    after = live_storages()
    return sum(after[key] for key in after.keys() - before.keys()), chunks, optimizer
