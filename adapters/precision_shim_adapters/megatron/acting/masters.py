"""Reload master weights after a framework loaded weights without the optimizer's states.

Megatron's optimizers step master weights and copy them over the parameters. So after a load of
weights alone the next step puts the former weights back, unless the framework calls
``reload_model_params``; verl and SkyRL do not. NeMo-RL's Megatron-Bridge does, but Megatron's
function leaves out two kinds of master weights: those in FusedAdam's state, and the copies that the
optimizer for CPU offload steps.

Each rank reloads the master weights that it owns, without communication.

Delete when: Megatron's ``reload_model_params`` reloads all master weights, and verl and SkyRL call
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from precision_shim.adapting import Call, decide, seam, warn

from ..deciding.wishes import DISPATCH, SCALING
from .build import megatron_label

FEATURES = (DISPATCH, SCALING)
"""Features that need correct masters; this file's seams act if one of these features is on."""

GROUP = "megatron weights alone"
PATHS = {GROUP: "Megatron (weights loaded without states)"}
"""Maps the group of this file's seams to its name for users."""

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
    """Reload the master weights that Megatron leaves out."""
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
    """Reload the fp32 shards on the GPU, then their copies, which the inner optimizers step."""
    for model_group, shards in zip(
        optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True
    ):
        for parameter, shard in zip(model_group, shards, strict=True):
            if shard is not None:  # a precision-aware optimizer has no such shards
                owned = optimizer._get_model_param_range_map(parameter)["param"]
                shard.copy_(parameter.view(-1)[owned.start : owned.end])
    for shard, copy in inner.param_to_inner_param.items():
        if copy is not shard:
            copy.copy_(shard)


def _reload_fused(inner: Any) -> None:
    """Reload the master weights in FusedAdam's state; before its first step there are none."""
    for shard, state in inner.state.items():
        master = state.get("master_param")
        if not isinstance(master, torch.Tensor):
            continue
        if master.dtype is torch.int16:
            master.zero_()  # the loaded weights leave no remainder
        else:
            # FusedAdam's setter applies the scale. The master weights may be offloaded to the host.
            inner.set_scaled_state(shard, "master_param", shard.detach().float().to(master.device))


def reload_masters(framework: str, subject: str, optimizer: Any) -> None:
    """Overwrite an optimizer's master weights with weights that were loaded without its states.

    An adapter calls it after its framework loaded the weights, in a seam for ``FEATURES`` in
    ``GROUP``. The moments and step counts stay unchanged.

    Args:
        framework: the framework's name.
        subject: which model.
        optimizer: Megatron's optimizer, chained or single, or ``None``.
    """
    reloaded = False
    for one in _each(optimizer):
        if getattr(getattr(one, "ddp_config", None), "use_megatron_fsdp", False):
            # Some versions of Megatron-FSDP ignore the reload silently, others end the job.
            warn(
                f"{framework} {subject}, {megatron_label()}: weights were loaded without the "
                "optimizer's states, and Megatron-FSDP cannot take them over into its masters: "
                "the next step may write the former weights back. Load the optimizer's states as "
                "well, or build the model from these weights."
            )
        elif hasattr(one, "_copy_model_params_to_main_params"):  # not the fp32 optimizer
            one.reload_model_params()
            reloaded = True
    if reloaded:
        decide(
            framework,
            subject,
            DISPATCH,
            "masters made anew of the loaded weights",
            "the weights were loaded without the optimizer's states",
        )


def _each(optimizer: Any) -> Iterator[Any]:
    """The optimizers in a chain and in chains within it, without stubs over frozen models."""
    # Megatron's layer-wise optimizer is a chain within a chain, and the attribute ``optimizer`` of
    # a chain of several optimizers raises.
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for one in chained:
            yield from _each(one)
    elif getattr(optimizer, "optimizer", None) is not None:
        yield optimizer
