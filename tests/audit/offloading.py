"""Builds whose optimizer Megatron offloads to the CPU, and the states that their steps use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from precision_shim.precision.remainders import join_master

from . import builds

OFFLOAD: dict[str, Any] = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "pin_cpu_grads": True,
    "pin_cpu_params": True,
}

READABLE = ("dp_reshardable", "dp_zero_gather_scatter")
"""Sharding types whose checkpoints Megatron can load again."""


def offloading(fraction: float, *, precision_aware: bool = True) -> builds.Build:
    """A build with the share ``fraction`` of its optimizer offloaded to the CPU."""
    config = OFFLOAD | {"optimizer_offload_fraction": fraction}
    if precision_aware:
        config |= {"use_precision_aware_optimizer": True, "main_grads_dtype": builds.BF16}
    return builds.Build(fp32_bucket=not precision_aware, config=config)


def stepped(optimizer: Any) -> list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Step count, master and moments of each parameter that is stepped, offloaded or not."""
    return [
        (count, master.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone())
        for one in getattr(optimizer, "chained_optimizers", [optimizer])
        for count, master, state in _stepped(one)
    ]


def same_stepped(one: list[Any], other: list[Any]) -> bool:
    """Whether the stepped states of two optimizers are the same, to the last bit."""
    return all(
        mine[0] == others[0] and all(map(torch.equal, mine[1:], others[1:]))
        for mine, others in zip(one, other, strict=True)
    )


def _stepped(one: Any) -> Iterator[tuple[int, torch.Tensor, dict[str, Any]]]:
    inner = one.optimizer
    within = getattr(inner, "param_to_inner_param", {})
    owners = {
        id(param): (part, group)
        for part in getattr(inner, "sub_optimizers", [inner])
        for group in part.param_groups
        for param in group["params"]
    }
    for index, order in one.model_param_group_index_map.values():
        shard = inner.param_groups[index]["params"][order]
        param = within.get(shard, shard)
        part, group = owners[id(param)]
        state = part.state[param]
        count = int((state if isinstance(part, torch.optim.AdamW) else group).get("step", 0))
        master = param if within else state.get("master_param", param)
        if master.dtype is torch.int16:
            master = join_master(param.detach(), master)
        yield count, master, state
