"""Save and load one parameter's states in Megatron's optimizer checkpoints.

``DistributedOptimizer`` reads and writes a parameter's states with the same two methods in every
sharding type. ``optimizer_state`` explains why the shim converts master weights. Three properties
of Megatron and TransformerEngine prevent an exact resume: FusedAdam keeps int16 remainders under
the name ``master_param``. FusedAdam fills the master weights of an fp32 parameter once and never
updates them. Megatron finds states by the parameter's number in its group, which does not follow
the group's order if the group has both fp32 and 16-bit parameters.

Delete this module with ``optimizer_state``, when Megatron numbers parameters in the group's order.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import Any

import torch

from precision_shim.adapting import Call, check_ranks, warn
from precision_shim.errors import CheckpointLayoutError
from precision_shim.precision import remainders
from precision_shim.precision.continuing import master_is_lost, moment_becomes
from precision_shim.precision.dtypes import name_of

from ..policy.groups import merged, restored
from ..policy.requested import STATES
from ..training.build import megatron_label
from .optimizer_state import OPTIMIZER, REMEDY, checkpoint_seam, join

_loading: weakref.WeakKeyDictionary[Any, list[CheckpointLayoutError]] = weakref.WeakKeyDictionary()
"""During ``load_state_dict``, maps the optimizer to the errors that ``split_states`` found."""


def _precision_aware(optimizer: Any) -> bool:
    """Whether FusedAdam keeps the master weights; false for the optimizer for CPU offload."""
    return bool(
        optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        and hasattr(optimizer.optimizer, "get_unscaled_state")
    )


def _shard_of(optimizer: Any, model_param: Any) -> Any:
    group, order = optimizer.model_param_group_index_map[model_param]
    return optimizer.optimizer.param_groups[group]["params"][order]


@checkpoint_seam(
    STATES,
    f"{OPTIMIZER}._build_optimizer_group_ranges",
    "a parameter's states are found by its place among its group's shards",
    "model_param_group_index_map",
    "opt_group_ranges",
    "shard_fp32_params_this_group",
    "shard_float16_params_this_group",
)
def place_fp32_first(call: Call) -> Any:
    """Number a group's parameters in the group's order: fp32 shards first.

    Megatron's numbers follow its buffers: a save fails with an error about sizes, or exchanges
    the states of two parameters of the same size.
    """
    known, ranges = result = call.proceed()
    places = {}
    for index, group in enumerate(ranges):
        ordered = sorted(group["params"], key=lambda param: param.dtype is not torch.float32)
        places.update({parameter: (index, place) for place, parameter in enumerate(ordered)})
    # Keep the order of the keys in ``known``, because other code of Megatron iterates over it.
    return {parameter: places[parameter] for parameter in known}, *result[1:]


@checkpoint_seam(
    STATES,
    f"{OPTIMIZER}._get_main_param_and_optimizer_states",
    "every sharding type reads one parameter's states here",
    "model_param_group_index_map",
    "use_precision_aware_optimizer_no_fp8_or_ds_fp8",
    "master_param",
    "config",
    "optimizer",
)
def join_states(call: Call, model_param: Any) -> Any:
    """Return the fp32 master weights if FusedAdam keeps remainders or stale master weights."""
    tensors = call.proceed()
    shard, kept = _shard_of(call.instance, model_param).detach(), tensors["param"]
    if model_param.dtype is torch.float32:
        # For a load, return a copy: the load must not overwrite the parameter, because
        # ``_own_master`` compares the loaded values with the parameter.
        tensors["param"] = shard.to(kept.device, copy=join.get() == "copy")
    elif _precision_aware(call.instance) and kept.dtype is torch.int16 and join.get() != "never":
        # Use the remainder's device, because verl saves while the optimizer is offloaded.
        tensors["param"] = remainders.join_master(shard.to(kept.device), kept)
    return tensors


@checkpoint_seam(
    STATES,
    f"{OPTIMIZER}._set_main_param_and_optimizer_states",
    "every sharding type writes one parameter's states here",
    "set_scaled_state",
    "config",
    "optimizer",
    "_get_model_param_range_map",
)
def split_states(call: Call, model_param: Any, tensors: Any) -> Any:
    """Convert loaded master weights to the optimizer's form; refuse states that would be rounded.

    Raises:
        CheckpointLayoutError: a state would be rounded, or remainders have been cast to floats.
    """
    optimizer = call.instance
    # Up to Megatron 0.16, dp_reshardable also passes a bool 'padding', which FusedAdam rejects.
    tensors = {key: value for key, value in tensors.items() if isinstance(value, torch.Tensor)}
    try:
        _refuse_what_is_lost(optimizer, model_param, tensors)
    except CheckpointLayoutError as error:
        if optimizer not in _loading:
            raise
        # Do not raise the error here, because the other ranks would wait forever. After the
        # loader's collectives, ``spread_parameters`` raises the stored error on all ranks.
        _loading[optimizer].append(error)
        return None
    value = tensors["param"]
    call.arguments["tensors"] = tensors
    if model_param.dtype is torch.float32:
        tensors["param"] = _own_master(model_shard(optimizer, model_param), value)
    elif not _precision_aware(optimizer):
        if value.dtype is torch.int16:
            live = model_shard(optimizer, model_param)
            tensors["param"] = remainders.join_master(live, value.to(live.device))
    else:
        _fit_master(optimizer, _shard_of(optimizer, model_param), tensors)
    # FusedAdam scales the passed tensor in place.
    before = tensors["param"].clone() if _keeps_scaled_masters(optimizer, model_param) else None
    # In two sharding types Megatron loads with autograd on, so torch refuses to write fp32 shards.
    with torch.no_grad():
        result = call.proceed()
    if before is not None:
        _tell_rounded(optimizer, _shard_of(optimizer, model_param), before)
    return result


def _keeps_scaled_masters(optimizer: Any, model_param: Any) -> bool:
    if model_param.dtype is torch.float32 or not _precision_aware(optimizer):
        return False
    state = optimizer.optimizer.state[_shard_of(optimizer, model_param)]
    return state["master_param"].dtype is torch.float16


def _tell_rounded(optimizer: Any, shard: Any, value: torch.Tensor) -> None:
    kept = optimizer.optimizer.get_unscaled_state(shard, "master_param")
    if not torch.equal(kept.to(value), value):
        warn(
            f"{megatron_label()}: the optimizer checkpoint's fp32 masters were rounded: this job "
            "keeps them in fp16 with a scale (main_params_dtype=fp16), and training may differ "
            "from the one that was saved. Set main_params_dtype to fp32, or leave it out, to go "
            "on exactly."
        )


def _own_master(live: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return an fp32 parameter itself as its master weights; warn if the checkpoint differs."""
    if not torch.equal(value.to(live), live):
        warn(
            f"{megatron_label()}: the optimizer checkpoint's masters of fp32 parameters are not "
            "these parameters' values. A precision-aware optimizer does not update such masters, "
            "and without the shim they are saved as they are; so the parameters stay as they came "
            "with the model. Load the model's weights from the same checkpoint, or they are not "
            "those that were saved."
        )
    return live.clone()  # for fp16 master weights FusedAdam scales the passed tensor in place


def _fit_master(optimizer: Any, shard: Any, tensors: dict[str, Any]) -> None:
    """Convert a 16-bit parameter's loaded master weights to the form that FusedAdam keeps."""
    value = tensors["param"]
    master = optimizer.optimizer.state[shard]["master_param"]
    if value.dtype is torch.int16 and master.dtype is not torch.int16:
        tensors["param"] = remainders.join_master(shard.detach(), value.to(shard.device))
    elif value.dtype is not torch.int16 and master.dtype is torch.int16:
        # Overwrite the parameter, which Megatron rounds with ties to even: the remainder belongs to
        # a parameter that is rounded as FusedAdam does, with ties away from zero.
        rounded, tensors["param"] = remainders.split_master(value.float().to(shard.device))
        shard.data.copy_(rounded)


def _refuse_what_is_lost(optimizer: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    value = tensors["param"]
    aware = _precision_aware(optimizer)

    def as_numbers() -> bool:
        # An fp32 parameter has no remainders, but a norm's initial 1s may look like remainders.
        live = partial(model_shard, optimizer, model_param)
        return model_param.dtype is not torch.float32 and remainders.looks_like_remainders(
            value, live
        )

    params = name_of(model_param.dtype)
    if master_is_lost(name_of(value.dtype), as_numbers, precision_aware=aware, params=params):
        raise CheckpointLayoutError(
            "Megatron optimizer checkpoint: its master weights are the int16 remainders of a "
            "precision-aware optimizer, stored as numbers by a Megatron without the shim; they "
            "cannot be turned back into weights for certain. The live optimizer keeps "
            f"{'remainders' if aware else 'fp32 masters'}. Resume with the settings and the "
            "Megatron that wrote it, save again with the shim on or with "
            "override_optimizer_config.store_param_remainders=False, or start from the model's "
            "weights without the optimizer's states."
        )
    if not aware:
        return
    state = optimizer.optimizer.state[_shard_of(optimizer, model_param)]
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            continue
        kept = state[name].dtype
        becomes = moment_becomes(
            name_of(kept), partial(remainders.rounds_exactly, tensors[name], kept)
        )
        if becomes == "rounded":
            raise CheckpointLayoutError(
                f"Megatron optimizer checkpoint: its {name} holds fp32 values, the live optimizer "
                f"keeps {name_of(kept)}: continuing would round them, and training would not be "
                f"the one that was saved. Set override_optimizer_config.{name}_dtype to fp32, or "
                f"{REMEDY}"
            )
        if becomes == "scaled":
            warn(
                f"Megatron optimizer checkpoint: {name} is kept in {name_of(kept)} with a scale "
                "that is computed anew on load; training may differ in the last bits."
            )


def model_shard(optimizer: Any, model_param: Any) -> torch.Tensor:
    """The live parameter's elements that this rank's optimizer owns."""
    owned = optimizer._get_model_param_range_map(model_param)["param"]
    shard: torch.Tensor = model_param.detach().view(-1)[owned.start : owned.end]
    return shard


@checkpoint_seam(
    STATES,
    f"{OPTIMIZER}.load_state_dict",
    "parameters written with the masters must reach the other ranks, and groups must not merge",
    "param_state",
    "param_group_identifier_keys",
    "config",
    "optimizer",
    "model_chunks",
    "data_parallel_group",
)
def spread_parameters(call: Call, state_dict: Any) -> Any:
    """Raise an error on all ranks if one rank refused the states, else all-gather the parameters.

    Parameter groups that Megatron takes for one get back the settings in which they differ.

    Raises:
        CheckpointLayoutError: ``split_states`` refused the states on this or on another rank, or a
            group has settings of its own that no saved group has.
    """
    optimizer = call.instance
    settings = _settings_of_groups(optimizer, state_dict)
    refused: list[CheckpointLayoutError] = []
    _loading[optimizer] = refused
    try:
        result = call.proceed()
    finally:
        del _loading[optimizer]
    groups = optimizer.optimizer.param_groups if settings else ()
    for group, own in zip(groups, settings, strict=True):
        group.update(own)
    if "param_state" not in state_dict:
        return result
    # Ranks own different parameters, or none: if only one rank raised, the other ranks would wait.
    group = optimizer.data_parallel_group
    check_ranks(group)
    every = [False] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, bool(refused), group=group)
    if refused:
        raise refused[0]
    if any(every):
        raise CheckpointLayoutError(
            "Megatron optimizer checkpoint: another rank of the data-parallel group refused it; "
            "its message says why."
        )
    if _precision_aware(optimizer):
        for chunk in optimizer.model_chunks:
            chunk.start_param_sync(force_sync=True)
    return result


def _settings_of_groups(optimizer: Any, state_dict: Any) -> list[Any]:
    """The settings for each live group; empty if Megatron takes each from the right group."""
    saved = state_dict.get("optimizer", {}).get("param_groups", ())
    live = getattr(optimizer.optimizer, "param_groups", ())
    keys = sys.modules[OPTIMIZER.partition(":")[0]].param_group_identifier_keys
    found = restored(live, saved, keys)
    if None in found:
        fields, group = merged(saved, keys), live[found.index(None)]
        raise CheckpointLayoutError(
            f"{megatron_label()}, optimizer checkpoint: Megatron does not tell its parameter "
            f"groups apart by {', '.join(fields)}, in which they differ, and none was saved with "
            f"this job's {', '.join(f'{name}={group.get(name)}' for name in fields)}. Set these as "
            "in the job that saved (lr, min_lr, decoupled_lr, or your own overrides), or start "
            "from the model's weights without the optimizer's states."
        )
    return found
