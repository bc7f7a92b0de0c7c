"""Megatron's optimizer checkpoints: written so that any Megatron reads them.

Why these layers. ``DistributedOptimizer`` reads and writes one parameter's states through one pair
of methods, for every sharding type: there the int16 remainder of a precision-aware optimizer
becomes the fp32 master that an unpatched Megatron expects, and comes apart again. Where the user's
own config is precision-aware, the unpatched Megatron expects remainders, and reads them in the two
sharding types that keep a dtype for each state: there they stay what they are. The bucket's dtype
is part of the checkpoint's keys in two of the sharding types; they are written with the bucket that
the job would have without the shim. ``dist_checkpointing.load`` is the one call that has both the
wanted layout and the directory in hand, before a tensor is read.

What cannot be continued exactly is refused: fp32 moments that would be rounded to bf16, and
remainders that an unpatched Megatron has already written as numbers.

Upstream: https://github.com/NVIDIA/Megatron-LM/issues/4222 (remainders cannot be loaded again),
https://github.com/NVIDIA/Megatron-LM/issues/2576 (the ``padding`` entry). Delete when both are
closed, remainders are stored under a name of their own, and the bucket's dtype left the keys.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch

from precision_shim.adapting import Call, seam, warn
from precision_shim.errors import CheckpointLayoutError
from precision_shim.rules.continuing import how_read, master_is_lost, moment_becomes
from precision_shim.rules.dtypes import name_of
from precision_shim.rules.remainders import (
    join_master,
    looks_like_remainders,
    rounds_exactly,
    split_master,
)

from ..checkpoints.megatron import DTYPES_IN_KEY, is_master, is_optimizers

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_ISSUE = "https://github.com/NVIDIA/Megatron-LM/issues/4222"
_Wrapper = TypeVar("_Wrapper", bound=Callable[..., Any])
_REMEDY = (
    "PRECISION_SHIM_OPTIMIZER_STATES=as-configured to continue with fp32 states (and leave low-"
    "precision dtypes out of the config), or start from the model's weights without the "
    "optimizer's states."
)

STATES = "megatron checkpoint states"
KEYS = "megatron checkpoint keys"
"""Two groups, since the second alone differs between versions: without it a switch of the bucket's
dtype is Megatron's own error, without the first it would be other weights."""

PATHS = {STATES: "Megatron (states in checkpoints)", KEYS: "Megatron (keys in checkpoints)"}
"""What users call them."""


def _seam(
    group: str, target: str, why: str, *relies_on: str, aliases: tuple[str, ...] = ()
) -> Callable[[_Wrapper], _Wrapper]:
    return seam(
        target,
        "bf16-dispatch",
        group=group,
        why=why,
        upstream=_ISSUE,
        delete_when="Megatron stores remainders as such, and its keys no longer hold the bucket",
        relies_on=relies_on,
        aliases=aliases,
        optional=True,
    )


bucket_without_shim: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""DDP modules whose bucket the shim aligned, to the ``grad_reduce_in_fp32`` they came with: written
by ``ddp.build_ddp``, read here."""

_added: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""OptimizerConfigs that are precision-aware by the shim alone, by ``id``: they have no hash."""

_as_they_are: ContextVar[bool] = ContextVar("precision_shim_remainders_as_they_are", default=False)
"""Whether remainders are being written that the same job would write without the shim."""

_loading: weakref.WeakKeyDictionary[Any, list[CheckpointLayoutError]] = weakref.WeakKeyDictionary()
"""Optimizers whose ``load_state_dict`` is under way, to what was refused in it so far."""


def note_precision_aware(config: Any, *, by_user: bool) -> None:
    """Remember whether an OptimizerConfig would be precision-aware without the shim.

    Args:
        config: Megatron's OptimizerConfig, the object that the optimizer gets.
        by_user: whether the framework makes it so of the user's config alone.
    """
    if config.use_precision_aware_optimizer and not by_user:
        _added[id(config)] = config


# -- one parameter's states -------------------------------------------------------------------


def _precision_aware(optimizer: Any) -> bool:
    """Whether FusedAdam keeps the masters (Megatron's offloading optimizer has no such method)."""
    return bool(
        optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        and hasattr(optimizer.optimizer, "get_unscaled_state")
    )


def _shard_of(optimizer: Any, model_param: Any) -> Any:
    group, order = optimizer.model_param_group_index_map[model_param]
    return optimizer.optimizer.param_groups[group]["params"][order]


@_seam(
    STATES,
    f"{_OPTIMIZER}._get_main_param_and_optimizer_states",
    "every sharding type reads one parameter's states here",
    "model_param_group_index_map",
    "use_precision_aware_optimizer_no_fp8_or_ds_fp8",
    "master_param",
    "config",
    "optimizer",
)
def join_states(call: Call, model_param: Any) -> Any:
    """Hand out an fp32 master where FusedAdam keeps a remainder."""
    tensors = call.proceed()
    if _precision_aware(call.instance) and not _as_they_are.get():
        shard = _shard_of(call.instance, model_param)
        if tensors["param"].dtype is torch.int16:
            # On the remainder's device: verl saves while the optimizer is offloaded.
            remainder = tensors["param"]
            tensors["param"] = join_master(shard.detach().to(remainder.device), remainder)
        elif shard.dtype is torch.float32:
            # FusedAdam keeps a master beside fp32 parameters and never updates it.
            tensors["param"] = shard.detach()
    return tensors


@_seam(
    STATES,
    f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
    "every sharding type writes one parameter's states here",
    "set_scaled_state",
    "config",
    "optimizer",
    "_get_model_param_range_map",
)
def split_states(call: Call, model_param: Any, tensors: Any) -> Any:
    """Take an fp32 master apart again; refuse what would not be continued exactly.

    Raises:
        CheckpointLayoutError: the checkpoint's states would be rounded, or are remainders that
            were stored as numbers.
    """
    optimizer = call.instance
    # Up to 0.16 the dp_reshardable form hands a bool named 'padding' on, which FusedAdam rejects.
    tensors = {key: value for key, value in tensors.items() if isinstance(value, torch.Tensor)}
    try:
        _refuse_what_is_lost(optimizer, model_param, tensors)
    except CheckpointLayoutError as error:
        if optimizer not in _loading:
            raise
        # Raised for all ranks alike once each has gone through the loader's collectives.
        _loading[optimizer].append(error)
        return None
    shard = _shard_of(optimizer, model_param)
    value = tensors["param"]
    call.arguments["tensors"] = tensors
    if not _precision_aware(optimizer):
        if value.dtype is torch.int16:
            live = model_shard(optimizer, model_param)
            tensors["param"] = join_master(live, value.to(live.device))
        return call.proceed()
    master = optimizer.optimizer.state[shard]["master_param"]
    if value.dtype is torch.int16 and master.dtype is not torch.int16:
        tensors["param"] = join_master(shard.detach(), value.to(shard.device))
    elif value.dtype is not torch.int16 and master.dtype is torch.int16:
        # The parameter is written too: FusedAdam rounds ties away from zero, Megatron to even.
        rounded, tensors["param"] = split_master(value.float().to(shard.device))
        shard.data.copy_(rounded)
    elif shard.dtype is torch.float32:
        shard.data.copy_(value)
    return call.proceed()


def _refuse_what_is_lost(optimizer: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    value = tensors["param"]
    aware = _precision_aware(optimizer)

    def live() -> torch.Tensor:
        return model_shard(optimizer, model_param)

    lost = master_is_lost(
        name_of(value.dtype),
        lambda: looks_like_remainders(value, live),
        precision_aware=aware,
        params=name_of(model_param.dtype),
    )
    if lost:
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
        kept = state[name].dtype if name in state else torch.float32
        fits = partial(_fits, tensors, name, kept)
        becomes = moment_becomes(name_of(kept), fits)
        if becomes == "rounded":
            raise CheckpointLayoutError(
                f"Megatron optimizer checkpoint: its {name} holds fp32 values, the live optimizer "
                f"keeps {name_of(kept)}: continuing would round them, and training would not be "
                f"the one that was saved. Set override_optimizer_config.{name}_dtype to fp32, or "
                f"{_REMEDY}"
            )
        if becomes == "scaled":
            warn(
                f"Megatron optimizer checkpoint: {name} is kept in {name_of(kept)} with a scale "
                "that is computed anew on load; training may differ in the last bits."
            )


def _fits(tensors: dict[str, Any], name: str, dtype: torch.dtype) -> bool:
    return rounds_exactly(tensors[name], dtype)


def model_shard(optimizer: Any, model_param: Any) -> torch.Tensor:
    """The live parameter's elements that this rank's optimizer owns."""
    owned = optimizer._get_model_param_range_map(model_param)["param"]
    shard: torch.Tensor = model_param.detach().view(-1)[owned.start : owned.end]
    return shard


@_seam(
    STATES,
    f"{_OPTIMIZER}.load_state_dict",
    "parameters written with the masters must reach the other ranks",
    "param_state",
    "config",
    "optimizer",
    "model_chunks",
    "data_parallel_group",
)
def spread_parameters(call: Call, state_dict: Any) -> Any:
    """Refuse on all ranks alike; gather the parameters that came with the masters, as a step would.

    Raises:
        CheckpointLayoutError: ``split_states`` refused on this rank or on another one.
    """
    optimizer = call.instance
    refused: list[CheckpointLayoutError] = []
    _loading[optimizer] = refused
    try:
        result = call.proceed()
    finally:
        del _loading[optimizer]
    if "param_state" not in state_dict:
        return result
    # Ranks own different parameters: a rank without a fault must learn of the others' and not wait.
    device = next(iter(optimizer.model_param_group_index_map), torch.zeros(0)).device
    flag = torch.tensor([float(bool(refused))], device=device)
    torch.distributed.all_reduce(
        flag, op=torch.distributed.ReduceOp.MAX, group=optimizer.data_parallel_group
    )
    if refused:
        raise refused[0]
    if flag.item():
        raise CheckpointLayoutError(
            "Megatron optimizer checkpoint: another rank of the data-parallel group refused it; "
            "its message says why."
        )
    if _precision_aware(optimizer):
        for chunk in optimizer.model_chunks:
            chunk.start_param_sync(force_sync=True)
    return result


# -- the bucket's dtype in the keys -------------------------------------------------------------


def _unpatched_grad_dtype(optimizer: Any) -> Callable[[torch.dtype], torch.dtype] | None:
    """Parameter dtype to the bucket dtype of the same job without the shim, if that differs."""
    for chunk in optimizer.model_chunks:
        if chunk in bucket_without_shim:
            in_fp32 = bucket_without_shim[chunk]
            return lambda param_dtype: torch.float32 if in_fp32 else param_dtype
    return None


def _keyed_as_unpatched(optimizer: Any, state: Any) -> Any:
    """A sharded state, in place, with the keys that the same job has without the shim."""
    dtype_of = _unpatched_grad_dtype(optimizer)
    if dtype_of is None:
        return state

    def rekeyed(by_dtypes: Any) -> Any:
        return {(key[0], dtype_of(key[0])): value for key, value in by_dtypes.items()}

    def renamed(match: re.Match[str]) -> str:
        param_dtype = getattr(torch, match[1].removeprefix("torch."))
        return f"dtype_({param_dtype}, {dtype_of(param_dtype)})"

    if isinstance(state, dict):
        for name in ("per_bucket_numel", "per_bucket_numel_unpadded"):
            if name in state:
                state[name].data = [rekeyed(one) for one in state[name].data]
        for tensor in _sharded_tensors(state):
            tensor.key = DTYPES_IN_KEY.sub(renamed, tensor.key)
    elif getattr(state, "data", None) is not None:  # the gathered form is one object
        state.data = {
            name: rekeyed(value) if isinstance(value, dict) else value
            for name, value in state.data.items()
        }
    return state


@_seam(
    KEYS,
    f"{_OPTIMIZER}.sharded_param_state_dp_zero",
    "the bucket's dtype is part of the gathered form's keys, too",
    "model_chunks",
)
def name_bucket_of_unpatched(call: Call) -> Any:
    """Write the keys that the same job has without the shim."""
    return _keyed_as_unpatched(call.instance, call.proceed())


@_seam(
    KEYS,
    f"{_OPTIMIZER}.sharded_param_state_dp_reshardable",
    "the bucket's dtype is part of these keys, and remainders can be read again",
    "per_bucket_numel_unpadded",
    "config",
    "model_chunks",
)
@_seam(
    KEYS,
    f"{_OPTIMIZER}.sharded_param_state_fs_model_space",
    "up to 0.15 the usual form, whose remainders can be read again, too",
    "config",
    "model_chunks",
)
def write_as_unpatched(call: Call, is_loading: bool) -> Any:
    """Write the same keys for the types that keep remainders.

    Remainders that the user configured are saved unchanged. Not while loading: what is wanted then
    is whole masters, for ``compare_layouts`` to hold against what is there.
    """
    by_user = _added.get(id(call.instance.config)) is not call.instance.config
    token = _as_they_are.set(by_user and not is_loading)
    try:
        return _keyed_as_unpatched(call.instance, call.proceed())
    finally:
        _as_they_are.reset(token)


@_seam(
    KEYS,
    f"{_OPTIMIZER}.load_parameter_state_from_dp_reshardable",
    "what the keys say is compared with the live bucket here",
    "per_bucket_numel_unpadded",
)
def name_live_bucket(call: Call, state_dict: Any) -> Any:
    """Give the loaded bookkeeping the live bucket's dtypes before Megatron compares them."""
    name = "per_bucket_numel_unpadded"
    if state_dict is not None and name in state_dict:
        live = [next(iter(one)) for one in call.instance.per_bucket_numel_unpadded]
        stored = state_dict[name]
        if len(live) == len(stored) and all(len(one) == 1 for one in stored):
            call.arguments["state_dict"] = {
                **state_dict,
                name: [
                    {key: next(iter(one.values()))} for key, one in zip(live, stored, strict=True)
                ],
            }
    return call.proceed()


@_seam(
    KEYS,
    f"{_OPTIMIZER}.load_parameter_state_from_dp_zero",
    "what the keys say is compared with the live bucket here, of the gathered form",
    "gbuf_ranges",
)
def name_live_bucket_dp_zero(call: Call, state_dict: Any) -> Any:
    """Do the same for the gathered form, which only some ranks hold."""
    if state_dict is not None:
        state = call.arguments["state_dict"] = dict(state_dict)
        for index, ranges in enumerate(call.instance.gbuf_ranges):
            stored = state.get(index)
            if len(ranges) == 1 and isinstance(stored, dict) and len(stored) == 1:
                state[index] = {next(iter(ranges)): next(iter(stored.values()))}
    return call.proceed()


# -- layouts compared before a tensor is read ---------------------------------------------------


@_seam(
    KEYS,
    "megatron.core.dist_checkpointing.serialization:load",
    "the one call that has the wanted layout and the directory, before a tensor is read",
    aliases=("megatron.core.dist_checkpointing:load",),
)
def compare_layouts(call: Call, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
    """Hold the wanted optimizer tensors against the checkpoint's metadata.

    Raises:
        CheckpointLayoutError: a tensor of the optimizer has another dtype in the checkpoint and
            would be cast without a word.
    """
    wanted = [
        tensor for tensor in _sharded_tensors(sharded_state_dict) if is_optimizers(tensor.key)
    ]
    if not wanted:
        return call.proceed()
    from megatron.core.dist_checkpointing import load_tensors_metadata
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        stored = load_tensors_metadata(str(checkpoint_dir))
    except (CheckpointingException, NotImplementedError) as error:  # no such metadata
        warn(
            f"Megatron optimizer checkpoint {checkpoint_dir}: its layout could not be "
            f"compared with the live optimizer's: {error!r}."
        )
        return call.proceed()
    for tensor in wanted:
        if tensor.key not in stored:
            tensor.key = _stored_key(tensor.key, stored)
        wants = tensor.data.dtype if hasattr(tensor, "build_fn") else tensor.dtype
        if tensor.key not in stored:
            continue
        there = stored[tensor.key].dtype
        read = how_read(name_of(there), name_of(wants), master=is_master(tensor.key))
        if read == "as it is":
            continue
        if read == "as remainders":
            # Remainders that an unpatched Megatron wrote: read them as such.
            tensor.data = torch.empty(tensor.data.shape, dtype=there, device=tensor.data.device)
            if not hasattr(tensor, "build_fn"):
                tensor.dtype = there
            continue
        raise CheckpointLayoutError(
            f"Megatron optimizer checkpoint {checkpoint_dir}: {tensor.key} is "
            f"{name_of(there)} there and {name_of(wants)} in the live optimizer. Set "
            f"{_REMEDY}"
        )
    return call.proceed()


def _stored_key(key: str, stored: Any) -> str:
    """The key of the same tensor under another bucket dtype, if the checkpoint has it so."""
    match = DTYPES_IN_KEY.search(key)
    if match is not None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            other = DTYPES_IN_KEY.sub(f"dtype_({match[1]}, {dtype})", key)
            if other in stored:
                return other
    return key


def _sharded_tensors(tree: Any) -> Iterator[Any]:
    """The tensors of a sharded state dict, and what makes several of one parameter's state."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(tree, (ShardedTensor, ShardedTensorFactory)):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _sharded_tensors(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _sharded_tensors(value)
