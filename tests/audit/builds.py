"""Real Megatron models and optimizers: consistent ones, and ones that contradict their config."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from precision_shim_tools.testing import tiny_gpt

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
    """How to make a model and its optimizer.

    Attributes:
        dtype: of the parameters.
        fp32_bucket: the DDP's ``grad_reduce_in_fp32``.
        config: fields of the OptimizerConfig.
        later: fields that are set on the OptimizerConfig after it was made.
        distributed: whether the distributed optimizer is used.
        flags: the dtype that the config states for the model; ``None``: the model's real dtype.
        experts: whether the model is a mixture of experts.
        model: fields of the TransformerConfig.
        model_later: fields that are set on the TransformerConfig after it was made.
        ddp: further fields of the DDP's config.
        norms: the dtype that weights of one dimension get after the DDP was made.
    """

    dtype: torch.dtype = BF16
    fp32_bucket: bool = True
    config: dict[str, Any] = field(default_factory=dict)
    later: dict[str, Any] = field(default_factory=dict)
    distributed: bool = True
    flags: torch.dtype | None = None
    experts: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    model_later: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    norms: torch.dtype | None = None


HONEST = {
    "bf16, as Megatron has it": Build(),
    "precision-aware": Build(fp32_bucket=False, config=PRECISION_AWARE),
    "precision-aware, whole masters": Build(fp32_bucket=False, config=WHOLE),
    "precision-aware, fp32 main grads": Build(config=PRECISION_AWARE | {"main_grads_dtype": FP32}),
    "precision-aware, fp32 moments": Build(
        fp32_bucket=False, config={"use_precision_aware_optimizer": True, "main_grads_dtype": BF16}
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
    # NeMo-RL's YAMLs set both "bf16: true" and 'params_dtype: "float32"'.
    "the flag and not params_dtype": Build(config={"params_dtype": FP32}),
}

NEMO_RL = Build(
    fp32_bucket=False,
    config={"use_precision_aware_optimizer": True, "params_dtype": FP32, "adam_beta2": 0.999},
)
"""The optimizer and the DDP in NeMo-RL 0.7's examples/configs/grpo_math_1B_megatron.yaml."""

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
"""AReaL 1.0.4 with optimizer.type=adam_bf16: areal/engine/megatron_engine.py sets the fields
``later`` on a finished config."""

PLANTED = {
    "main-grads-dtype": Build(fp32_bucket=False),
    "main-grads-dtype, precision-aware": Build(config=PRECISION_AWARE),
    "main-grads-dtype, NeMo-RL": NEMO_RL,
    "main-grads-dtype, of fp32 weights": Build(
        fp32_bucket=False, config=PRECISION_AWARE, norms=FP32
    ),
    # The optimizer was made before.
    "moment-dtype": Build(
        fp32_bucket=False, config=PRECISION_AWARE | {"exp_avg_sq_dtype": FP32, "adam_beta2": 0.95}
    ),
    "master-missing": Build(distributed=False, flags=FP32),
    "master-dtype": AREAL,
    "params-dtype": Build(FP32, flags=BF16),
    "scaler-missing": Build(FP16, flags=BF16),
}
"""Maps the code of each problem to a build that has the problem."""

EIGHT = {
    "plain": Build(),
    "precision-aware, remainders": Build(fp32_bucket=False, config=PRECISION_AWARE),
    "precision-aware, whole masters": Build(fp32_bucket=False, config=WHOLE),
    "fp16": Build(FP16, config={"initial_loss_scale": 1024.0}),
}
"""Each build as a dense model and as a mixture of experts: eight builds in all."""


def with_experts(build: Build, experts: bool = True) -> Build:
    """The same build, with or without a mixture of experts."""
    return replace(build, experts=experts)


def make(build: Build, seed: int = 0) -> tuple[list[Any], Any]:
    """DDP chunks and Megatron's optimizer over them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    parallel: dict[str, Any] = dict(build.model)
    if build.experts:
        from megatron.core import parallel_state

        size = parallel_state.get_expert_model_parallel_world_size()
        parallel |= {"num_moe_experts": 2, "expert_model_parallel_size": size}
    provider = tiny_gpt(build.dtype, **parallel)
    config = provider.config  # type: ignore[attr-defined]
    for name, value in build.model_later.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = provider()
    if build.dtype is not FP32:
        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=build.distributed,
        grad_reduce_in_fp32=build.fp32_bucket,
        **build.ddp,
    )
    chunks = [DistributedDataParallel(config, ddp_config, model)]
    for parameter in model.parameters() if build.norms else ():
        if parameter.dim() == 1:
            parameter.data = parameter.data.to(build.norms)
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
    """Plant a contradiction that no config can cause."""
    if code == "moment-dtype":
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            one.config.exp_avg_sq_dtype = BF16


def step(chunks: list[Any], optimizer: Any, *, world: int = 1, rank: int = 0) -> None:
    """Train one step and keep its gradients."""
    train(chunks, optimizer, 1, world=world, rank=rank)


def step_without_forward(chunks: list[Any], optimizer: Any) -> None:
    """Take one step on gradients written into the bucket, so that no activation is left behind."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(0.125)
    optimizer.step()


# -- all that lives ----------------------------------------------------------------------------


def live_storages() -> dict[int, int]:
    """Identity and size of the storage of every live tensor in the process."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):
            storage = getattr(one, "_local_tensor", one).untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def held_by(build: Build) -> tuple[int, list[Any], Any]:
    """Return the bytes that a model and its first step keep, the chunks and the optimizer."""
    before = live_storages()
    chunks, optimizer = make(build)
    step_without_forward(chunks, optimizer)
    after = live_storages()
    return sum(after[key] for key in after.keys() - before.keys()), chunks, optimizer
