"""Write and read Megatron's optimizer checkpoints in an unpatched Megatron's format.

On a save, the shim converts a precision-aware optimizer's int16 remainder to the fp32 master weight
that an unpatched Megatron expects; on a load, it splits the master weight into parameter and
remainder again. If the user's config turns on the precision-aware optimizer, even an unpatched
Megatron expects remainders: in the two sharding types that store a dtype for each state, the shim
saves them unchanged. In two sharding types the keys contain the bucket's dtype; the shim writes the
keys of a job without the shim. Dtypes are compared in ``dist_checkpointing.load``, before Megatron
reads: the shim refuses fp32 moments that would be rounded to bf16, and remainders whose int16 bits
an unpatched Megatron has cast to floats.

Delete this module when https://github.com/NVIDIA/Megatron-LM/issues/4222 (remainders cannot be
loaded again) and https://github.com/NVIDIA/Megatron-LM/issues/2576 (the ``padding`` entry) are
closed, Megatron stores remainders under a separate name, and no key contains the bucket's dtype.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch

from precision_shim.adapting import (
    Call,
    at_uninstall,
    current_settings,
    holding,
    report,
    seam,
    version_of,
    warn,
)
from precision_shim.errors import CheckpointLayoutError, CheckpointUnreadableError
from precision_shim.files.metadata import METADATA, read_metadata
from precision_shim.precision.continuing import how_read, rounded
from precision_shim.precision.dtypes import name_of, parse_dtype

from ...common.megatron_keys import DTYPES_IN_KEY, is_master, is_optimizers
from ..policy.requested import KEYS, STATES

OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_ISSUE = "https://github.com/NVIDIA/Megatron-LM/issues/4222"
_Wrapper = TypeVar("_Wrapper", bound=Callable[..., Any])
REMEDY = (
    "PRECISION_SHIM_OPTIMIZER_STATES=as-configured to continue with fp32 states (and leave low-"
    "precision dtypes out of the config), or start from the model's weights without the "
    "optimizer's states."
)

_LOAD_MASTERS = (
    "Load the optimizer's states as well, whose fp32 masters have what the weights lose, or set "
    "the parameters' dtype to fp32."
)


def checkpoint_seam(
    group: str, target: str, why: str, *relies_on: str, aliases: tuple[str, ...] = ()
) -> Callable[[_Wrapper], _Wrapper]:
    """Call ``seam`` with the arguments that all seams for checkpoints share."""
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
"""``grad_reduce_in_fp32`` of the framework, for each DDP whose bucket ``ddp.build_ddp`` aligned."""

_ADDED = "_precision_shim_added"
"""Marks a config that only the shim made precision-aware; ``copy`` and ``pickle`` keep the mark."""

_OWN = ("adam_eps", "sgd_momentum")
"""Fields of a config with ``_ADDED`` in which the shim stores new float objects of equal value. A
copy by ``dataclasses.replace`` lacks ``_ADDED``, but contains these objects, which identify it."""

_own_floats: dict[int, float] = {}
"""Maps the ``id`` of each new float in an ``_OWN`` field to the float."""

join: ContextVar[str] = ContextVar("precision_shim_join", default="")
"""How ``join_states`` joins states: ``"never"`` if a save keeps remainders unchanged, as the same
job without the shim would save them, and ``"copy"`` if a load writes into the joined tensors."""


def note_precision_aware(config: Any, *, by_user: bool) -> None:
    """Mark an OptimizerConfig that is precision-aware only because of the shim.

    The optimizer may get a copy of ``config``. ``by_user``: it is precision-aware without the shim.
    """
    if not config.use_precision_aware_optimizer or by_user:
        return
    setattr(config, _ADDED, True)
    _drop_unused()
    at_uninstall(_drop_unused)
    for name in _OWN:
        value = getattr(config, name, None)
        if isinstance(value, float):
            own = value * 1.0  # creates a new float object, which float(value) would not
            _own_floats[id(own)] = own
            setattr(config, name, own)


def _drop_unused() -> None:
    """Drop the floats that no config and no optimizer holds any more."""
    held = [(0, object()), *_own_floats.items()]
    alone, *counts = [sys.getrefcount(pair[1]) for pair in held]
    for (key, _), count in zip(held[1:], counts, strict=True):
        if count == alone + 1:  # the reference of ``_own_floats``
            del _own_floats[key]


def is_added_by_shim(config: Any) -> bool:
    """Whether a config (or its original, for a copy) is precision-aware only due to the shim."""
    values = (getattr(config, name, None) for name in _OWN)
    return hasattr(config, _ADDED) or any(
        isinstance(value, float) and _own_floats.get(id(value)) is value for value in values
    )


@checkpoint_seam(
    STATES, f"{OPTIMIZER}.sharded_state_dict", "every sharding type is saved and loaded through it"
)
def refuse_torchs_adam(
    call: Call, is_loading: bool, metadata: Any = None, sharding_type: Any = None
) -> Any:
    """On a save, warn that Megatron cannot load the states of torch's Adam; on a load, raise.

    Without TransformerEngine and Apex, Megatron uses torch's Adam, which has no step count before
    its first step: Megatron's load asserts that there is one, or loses the loaded one.

    Raises:
        CheckpointLayoutError: the job loads states of torch's Adam, or saves them in strict mode.
    """
    optimizer = call.instance
    kind = sharding_type or (metadata or {}).get("distrib_optim_sharding_type", "the default")
    if kind == "fsdp_dtensor" or not _steps_with_torchs_adam(optimizer):
        return call.proceed()
    message = (
        f"megatron-core {version_of('megatron-core', ('megatron',))}, optimizer checkpoint, "
        f"sharding type {kind}: without TransformerEngine the distributed optimizer steps with "
        "torch's Adam, whose states this Megatron saves and cannot load: every sharding type "
        "(dp_reshardable, fully_reshardable, dp_zero_gather_scatter) loses the step count. Install "
        "TransformerEngine before the job trains, or leave the optimizer's states out of its "
        "checkpoints and resume from the model's weights."
    )
    if is_loading or current_settings().strict:
        raise CheckpointLayoutError(message)
    warn(message)
    return call.proceed()


def _steps_with_torchs_adam(optimizer: Any) -> bool:
    megatron = sys.modules.get(OPTIMIZER.partition(":")[0])
    return isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW) and not getattr(
        megatron, "HAVE_APEX_OR_TE", True
    )


def _rekey_as_unpatched(optimizer: Any, state: Any) -> Any:
    """Rename a sharded state's keys in place to the keys of the same job without the shim."""
    known = [chunk for chunk in optimizer.model_chunks if chunk in bucket_without_shim]
    if not known:
        return state
    in_fp32 = bucket_without_shim[known[0]]

    def dtype_of(param_dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if in_fp32 else param_dtype

    def rekeyed(by_dtypes: Any) -> Any:
        return {(key[0], dtype_of(key[0])): value for key, value in by_dtypes.items()}

    def renamed(match: re.Match[str]) -> str:
        param_dtype = getattr(torch, match[1].removeprefix("torch."))
        return f"dtype_({param_dtype}, {dtype_of(param_dtype)})"

    if isinstance(state, dict):
        for name in ("per_bucket_numel", "per_bucket_numel_unpadded"):
            if name in state:
                state[name].data = [rekeyed(part) for part in state[name].data]
        for tensor in _sharded_tensors(state):
            tensor.key = DTYPES_IN_KEY.sub(renamed, tensor.key)
    elif getattr(state, "data", None) is not None:  # ``dp_zero_gather_scatter``: one object
        state.data = {
            name: rekeyed(value) if isinstance(value, dict) else value
            for name, value in state.data.items()
        }
    return state


@checkpoint_seam(
    KEYS,
    f"{OPTIMIZER}.sharded_param_state_dp_zero",
    "the bucket's dtype is part of the gathered form's keys, too",
    "model_chunks",
)
def name_bucket_of_unpatched(call: Call) -> Any:
    """Write the checkpoint keys that the same job would write without the shim."""
    return _rekey_as_unpatched(call.instance, call.proceed())


@checkpoint_seam(
    KEYS,
    f"{OPTIMIZER}.sharded_param_state_dp_reshardable",
    "the bucket's dtype is part of these keys, and remainders can be read again",
    "per_bucket_numel_unpadded",
    "config",
    "model_chunks",
)
@checkpoint_seam(
    KEYS,
    f"{OPTIMIZER}.sharded_param_state_fs_model_space",
    "up to 0.15 the usual form, whose remainders can be read again, too",
    "config",
    "model_chunks",
)
def write_as_unpatched(call: Call, is_loading: bool) -> Any:
    """Write the keys and remainders that the same job would write without the shim.

    A save writes remainders only if the optimizer is precision-aware without the shim, too. A load
    requests whole fp32 masters; ``compare_layouts`` compares this request with the checkpoint.
    """
    by_shim = is_added_by_shim(call.instance.config)
    with holding(join, "copy" if is_loading else "" if by_shim else "never"):
        return _rekey_as_unpatched(call.instance, call.proceed())


@checkpoint_seam(
    KEYS,
    f"{OPTIMIZER}.load_parameter_state_from_dp_reshardable",
    "what the keys say is compared with the live bucket here",
    "per_bucket_numel_unpadded",
)
def name_live_bucket(call: Call, state_dict: Any) -> Any:
    """Write the live bucket's dtypes into a loaded state, because Megatron refuses other dtypes."""
    name = "per_bucket_numel_unpadded"
    if state_dict is not None and name in state_dict:
        live = [next(iter(bucket)) for bucket in call.instance.per_bucket_numel_unpadded]
        stored = state_dict[name]
        if len(live) == len(stored) and all(len(bucket) == 1 for bucket in stored):
            sizes = (next(iter(bucket.values())) for bucket in stored)
            renamed = [{key: size} for key, size in zip(live, sizes, strict=True)]
            call.arguments["state_dict"] = {**state_dict, name: renamed}
    return call.proceed()


@checkpoint_seam(
    KEYS,
    f"{OPTIMIZER}.load_parameter_state_from_dp_zero",
    "what the keys say is compared with the live bucket here, of the gathered form",
    "gbuf_ranges",
)
def name_live_bucket_dp_zero(call: Call, state_dict: Any) -> Any:
    """Write the live bucket's dtypes into a loaded state of ``dp_zero_gather_scatter``."""
    if state_dict is not None:  # some ranks receive no state
        state = call.arguments["state_dict"] = dict(state_dict)
        for index, ranges in enumerate(call.instance.gbuf_ranges):
            stored = state.get(index)
            if len(ranges) == 1 and isinstance(stored, dict) and len(stored) == 1:
                state[index] = {next(iter(ranges)): next(iter(stored.values()))}
    return call.proceed()


@checkpoint_seam(
    KEYS,
    "megatron.core.dist_checkpointing.serialization:load",
    "the one call that has the wanted layout and the directory, before a tensor is read",
    aliases=("megatron.core.dist_checkpointing:load",),
)
def compare_layouts(call: Call, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
    """Compare the dtypes of the wanted optimizer tensors with the checkpoint's metadata.

    Of weights that are loaded without their optimizer's states, and so without their fp32 masters,
    tell which are rounded.

    Raises:
        CheckpointLayoutError: a tensor has another dtype, and Megatron would cast it silently; for
            weights, only in strict mode.
    """
    every = [*_sharded_tensors(sharded_state_dict)]
    if not every:
        return call.proceed()
    wanted = [tensor for tensor in every if is_optimizers(tensor.key)]
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        stored = _stored_dtypes(str(checkpoint_dir))
    except (CheckpointingException, CheckpointUnreadableError, NotImplementedError) as error:
        if wanted:
            warn(
                f"Megatron optimizer checkpoint {checkpoint_dir}: its layout could not be "
                f"compared with the live optimizer's: {error!r}."
            )
        return call.proceed()
    if not wanted and any(map(is_optimizers, stored)):
        known = (tensor for tensor in every if tensor.key in stored)
        found = (("weights", name_of(stored[one.key]), name_of(_dtype_of(one))) for one in known)
        where = f"Megatron checkpoint {checkpoint_dir}"
        report(rounded(found, where, "", _LOAD_MASTERS), CheckpointLayoutError)
    for tensor in wanted:
        tensor.key = _stored_key(tensor.key, stored)
        if tensor.key not in stored:
            continue
        makes_several = hasattr(tensor, "build_fn")
        wants = _dtype_of(tensor)
        there = stored[tensor.key]
        read = how_read(name_of(there), name_of(wants), master=is_master(tensor.key))
        if read == "cast":
            raise CheckpointLayoutError(
                f"Megatron optimizer checkpoint {checkpoint_dir}: {tensor.key} is "
                f"{name_of(there)} there and {name_of(wants)} in the live optimizer. Set {REMEDY}"
            )
        if read == "as remainders":
            # An unpatched Megatron wrote int16 remainders: do not let Megatron cast them to fp32.
            tensor.data = torch.empty(tensor.data.shape, dtype=there, device=tensor.data.device)
            if not makes_several:
                tensor.dtype = there
    return call.proceed()


def _dtype_of(tensor: Any) -> torch.dtype:
    dtype: torch.dtype = (tensor.data if hasattr(tensor, "build_fn") else tensor).dtype
    return dtype


def _stored_dtypes(directory: str) -> dict[str, torch.dtype]:
    """Map a checkpoint's tensor keys to dtypes; without a local file, use Megatron's reader."""
    path = Path(directory, METADATA)
    if not path.is_file():
        from megatron.core.dist_checkpointing import load_tensors_metadata

        return {key: tensor.dtype for key, tensor in load_tensors_metadata(directory).items()}
    with path.open("rb") as file:
        _, entries = read_metadata(file, str(path))
    return {
        key: parse_dtype(entry.dtype) or getattr(torch, entry.dtype)
        for key, entry in entries.items()
        if entry.dtype is not None
    }


def _stored_key(key: str, stored: Any) -> str:
    """Find a tensor's key in a checkpoint whose keys may name another bucket dtype."""
    match = None if key in stored else DTYPES_IN_KEY.search(key)
    if match is not None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            other = DTYPES_IN_KEY.sub(f"dtype_({match[1]}, {dtype})", key)
            if other in stored:
                return other
    return key


def _sharded_tensors(tree: Any) -> Iterator[Any]:
    """Yield a state dict's sharded tensors, and its factories, which make several tensors each."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(tree, (ShardedTensor, ShardedTensorFactory)):
        yield tree
    elif isinstance(tree, (dict, list)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _sharded_tensors(value)
