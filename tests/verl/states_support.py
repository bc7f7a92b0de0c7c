"""Models with fp32 parameters and their optimizers, made by Megatron's own classes."""

from __future__ import annotations

from typing import Any

import torch

from precision_shim_tools.testing import tiny_gpt

from ..stand_ins.optimizer_states import live_states

AWARE: dict[str, Any] = {"use_precision_aware_optimizer": True}

KINDS = ("fp32", "fp32 norms", "fp32 head")
"""Models whose parameters are all fp32, or bf16 models in which only some are fp32."""


def build(
    kind: str, *, seed: int = 0, experts: int | None = None, **fields: Any
) -> tuple[list[Any], Any]:
    """The DDP chunks of a model, and their distributed optimizer.

    Args:
        kind: one of ``KINDS``, or ``"bf16"``.
        seed: the random seed of the first weights.
        experts: the number of experts; None for a dense model.
        fields: fields of the OptimizerConfig.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    provider: Any = tiny_gpt(dtype, num_moe_experts=experts)
    torch.manual_seed(seed)
    model = provider()
    if dtype is torch.bfloat16:
        model = Float16Module(provider.config, model)
    for name, module in model.named_modules():
        if kind == "fp32 norms" and "Norm" in type(module).__name__:
            module.float()
            module.register_forward_pre_hook(_in_fp32)
            module.register_forward_hook(lambda module, given, made: made.bfloat16())
        elif kind == "fp32 head" and name.endswith("output_layer"):
            module.float()
            module.register_forward_pre_hook(_in_fp32)
    chunks = [
        DistributedDataParallel(
            provider.config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            model,
        )
    ]
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        **fields,
    )
    return chunks, get_megatron_optimizer(config, chunks)


def _in_fp32(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.float() if isinstance(one, torch.Tensor) else one for one in given)


def everything(chunks: list[Any], optimizer: Any) -> list[torch.Tensor]:
    """All parameters, and the masters and moments that this rank has.

    The master of an fp32 parameter is the parameter itself.
    """
    found = [one.detach().float().clone() for chunk in chunks for one in chunk.parameters()]
    names = {p: name for chunk in chunks for name, p in chunk.named_parameters()}
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not any(one.optimizer.state.values()):
            continue
        # Sorted by name, because the tests look for shards at wrong positions in their group.
        owned = one.model_param_group_index_map
        ranges = {p: one._get_model_param_range_map(p)["param"] for p in names if p in owned}
        states = {p: (master, state) for p, master, state in live_states(one)}
        for parameter in sorted(ranges, key=names.__getitem__):
            master, state = states[parameter]
            own = ranges[parameter]
            assert master.numel() == own.end - own.start, names[parameter]
            if parameter.dtype is not torch.float32:
                found.append(master)
            found += [state[name].detach().float().clone() for name in ("exp_avg", "exp_avg_sq")]
    return found
