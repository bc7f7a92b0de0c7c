"""Reload master weights after a framework loaded weights without the optimizer's states.

Else the next step restores the former weights, unless the framework calls ``reload_model_params``,
as NeMo-RL's Megatron-Bridge does; verl and SkyRL do not. That function skips the master weights in
FusedAdam's state and CPU offload's copies. Each rank reloads its own, without communication.
Delete this module when ``reload_model_params`` reloads all, and verl and SkyRL call it.
"""

from __future__ import annotations

from typing import Any

import torch

from precision_shim.adapting import Call, decide, seam, warn

from ..buffers import unchain
from ..policy.requested import DISPATCH, SCALING
from .build import megatron_label

FEATURES = (DISPATCH, SCALING)
"""Features that need correct masters; this file's seams act if one of these features is on."""

GROUP = "megatron weights alone"

UPSTREAM = "https://github.com/NovaSky-AI/SkyRL/pull/2149"


@seam(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
    "._copy_model_params_to_main_params",
    FEATURES,
    group=GROUP,
    why="every reload of the masters ends here, and leaves some of them out",
    upstream=UPSTREAM,
    delete_when="Megatron reloads FusedAdam's masters and the offloading optimizer's copies",
    relies_on=(
        "HybridDeviceOptimizer",
        "use_precision_aware_optimizer_no_fp8_or_ds_fp8",
        "optimizer",
        "model_float16_groups",
        "shard_fp32_from_float16_groups",
        "_get_model_param_range_map",
    ),
    optional=True,
)
def reload_all(call: Call) -> Any:
    """Reload the master weights that ``reload_model_params`` does not reload."""
    result = call.proceed()
    optimizer = call.instance
    inner = optimizer.optimizer
    with torch.no_grad():
        if hasattr(inner, "param_to_inner_param"):
            _reload_offloaded(optimizer, inner)
        else:
            _reload_fused(inner)
    return result


def _reload_offloaded(optimizer: Any, inner: Any) -> None:
    """Reload the fp32 shards on the GPU, then copies of the shards in the inner optimizers."""
    for model_group, shards in zip(
        optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True
    ):
        for parameter, shard in zip(model_group, shards, strict=True):
            if shard is not None:  # a precision-aware optimizer has no fp32 shards
                owned = optimizer._get_model_param_range_map(parameter)["param"]
                shard.copy_(parameter.view(-1)[owned.start : owned.end])
    for shard, copy in inner.param_to_inner_param.items():
        if copy is not shard:
            copy.copy_(shard)


def _reload_fused(inner: Any) -> None:
    """Reload the master weights in FusedAdam's state; before the first step the state is empty."""
    for shard, state in inner.state.items():
        master = state.get("master_param")
        if not isinstance(master, torch.Tensor):
            continue
        if master.dtype is torch.int16:
            master.zero_()  # the loaded weight is bf16, so the master's low 16 bits are 0
        else:
            # ``set_scaled_state`` applies FusedAdam's scale. Master weights may be on the host.
            inner.set_scaled_state(shard, "master_param", shard.detach().float().to(master.device))


def reload_masters(framework: str, subject: str, optimizer: Any) -> None:
    """Overwrite master weights with weights that were loaded without the optimizer's states.

    In a seam with the features ``FEATURES`` and the group ``GROUP``, an adapter calls
    ``reload_masters`` after the framework loaded weights. Moments and step counts do not change.
    ``optimizer`` is an optimizer of Megatron, chained or single, or ``None``.
    """
    reloaded = False
    for inner in unchain(optimizer):
        if getattr(inner, "optimizer", None) is None:  # it has no parameters
            continue
        if getattr(getattr(inner, "ddp_config", None), "use_megatron_fsdp", False):
            # Some versions of Megatron-FSDP ignore a reload silently, other versions end the job.
            warn(
                f"{framework} {subject}, {megatron_label()}: weights were loaded without the "
                "optimizer's states, and Megatron-FSDP cannot take them over into its masters: "
                "the next step may write the former weights back. Load the optimizer's states as "
                "well, or build the model from these weights."
            )
        elif hasattr(inner, "_copy_model_params_to_main_params"):  # not the fp32 optimizer
            inner.reload_model_params()
            reloaded = True
    if reloaded:
        why = "the weights were loaded without the optimizer's states"
        decide(framework, subject, DISPATCH, "masters made anew of the loaded weights", why)
