"""Read torch's optimizers, DTensors and FSDP for the audit.

This module reads only sizes, dtypes, devices and storages; it starts no operation on a tensor.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..precision.effect import COMPUTES, REDUCES
from .reading import SIXTEEN_BIT, DeclaredStates, Owned, Reading, gradients_of, tensors_of, unique

_MODEL_PARALLEL = ("tp", "pp", "cp", "sp", "ep")
"""Names of device mesh dimensions that divide the model instead of the data."""


def read_torch(
    chunks: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer], scaler: Any
) -> list[Reading]:
    """Read torch's single optimizers of a model; there may be no modules and no scaler."""
    in_model = {id(p) for chunk in chunks for p in chunk.parameters()}
    widths = {p.dtype.itemsize for c in chunks for p in c.parameters() if p.requires_grad}
    in_model |= {id(shard) for shard in shards_by_gathered(chunks).values()}
    flat = _flat_parameters(chunks)
    readings, mixed = [], mixed_dtypes(chunks)
    for optimizer in optimizers:
        params = unique(p for group in optimizer.param_groups for p in group["params"])
        rates = {id(p): _rate(group) for group in optimizer.param_groups for p in group["params"]}
        reading = Reading("torch", "model", type(optimizer).__name__, scaler=scaler, mixed=mixed)
        for p in params:
            foreign = bool(chunks) and id(p) not in in_model
            # A master is in fp32 or fp64, and has bits that a parameter of the model lacks.
            master = foreign and p.dtype.itemsize > max(2, min(widths, default=2))
            used = p.grad is not None or optimizer.state.get(p)
            if not (p.requires_grad or foreign or used):
                # verl also passes frozen parameters to the optimizer if it trains with LoRA.
                reading.frozen.append(p)
                continue
            owned = Owned(p.dtype, p, (p,) if master else (), parameter=p, lr=rates[id(p)])
            owned.take(optimizer.state.get(p, {}))
            reading.owned.append(owned)
            if not master:
                (reading.also_params if foreign else reading.trainable).append(p)
        meshes = [p for p in params if any(map(_divides, getattr(p, "placements", ())))]
        reading.whole_sizes = {id(p): flat[id(p)].size for p in params if id(p) in flat}
        in_flat = [flat[id(p)].shards for p in params if id(p) in flat]
        reading.shards = max([*map(_shards, meshes), *in_flat], default=1)
        reading.sharded = reading.params_sharded = reading.shards > 1
        reading.data_parallel_size = _data_parallel_size(chunks, meshes or params)
        reading.gradients = [grad for p in params for grad in gradients_of(p)]
        reading.padding = _padding_of(reading, flat)
        read_inner(reading, optimizer)
        reading.copies_later = reading.declared_states.exp_avg is not None
        readings.append(reading)
    if readings and scaler is not None:
        readings[0].other += tensors_of(scaler)
    return readings


def read_inner(reading: Reading, optimizer: torch.optim.Optimizer) -> None:
    """Add an optimizer's betas, scales, other tensors and declared dtypes to a reading."""
    reading.steppers.append(optimizer)
    groups = [group for group in optimizer.param_groups if group.get("params")]
    reading.betas = tuple(
        dict.fromkeys(
            tuple(float(beta) for beta in group["betas"])
            for group in groups
            if isinstance(group.get("betas"), (tuple, list))
            and not any(isinstance(beta, torch.Tensor) for beta in group["betas"])
        )
    )
    # torchao's optimizers, AnyPrecisionAdamW, and Apex's FusedAdam, whose state lacks its masters
    held = vars(optimizer)
    keeps = held.get("bf16_stochastic_round")
    keeps = keeps or ("exp_avg_dtype" not in held and held.get("master_weights"))
    reading.keeps_small_updates = bool(keeps) or any(g.get("use_kahan_summation") for g in groups)
    # An optimizer's attributes (an overflow flag) and parameter groups (an lr) may be tensors.
    reading.other += tensors_of(optimizer)
    scales = getattr(optimizer, "_scales", {}).values()  # of TransformerEngine's FusedAdam
    for values in (*scales, *groups):
        reading.other += [value for value in values.values() if isinstance(value, torch.Tensor)]
    reading.declared_states = declared_states(optimizer)
    reading.stateless = isinstance(optimizer, torch.optim.SGD) and not any(
        group.get("momentum") for group in groups
    )


def _rate(group: Mapping[str, Any]) -> float:
    """Return the lr, before a warmup, of a group that Adam or its like steps; else 0."""
    lr = group.get("initial_lr", group.get("lr")) if group.get("betas") else None
    if isinstance(lr, torch.Tensor):
        lr = lr.item() if lr.device.type == "cpu" else None
    return lr or 0.0


def declared_states(optimizer: torch.optim.Optimizer) -> DeclaredStates:
    """Return the dtypes of the states that an optimizer's first step will create.

    TransformerEngine's FusedAdam has its states' dtypes as attributes. The Adam of torch creates
    states in the parameters' dtypes. The result is empty if a subclass of Adam overrides ``step``,
    or if a hook runs before the step: it may create states in another dtype.
    """
    kinds = vars(optimizer)
    if isinstance(kinds.get("exp_avg_dtype"), torch.dtype):
        master = None
        if kinds.get("master_weights"):
            whole = kinds.get("master_weight_dtype", torch.float32)
            remainders = bool(kinds.get("store_param_remainders"))

            def master(dtype: torch.dtype) -> torch.dtype | None:
                return torch.int16 if remainders and dtype is torch.bfloat16 else whole

        return DeclaredStates(
            lambda _: kinds["exp_avg_dtype"], lambda _: kinds.get("exp_avg_sq_dtype"), master
        )
    steps = inspect.unwrap(type(optimizer).step)  # torch wraps its optimizers' ``step``
    hooks = optimizer._optimizer_step_pre_hooks.values()
    others = [hook for hook in hooks if not hook.__module__.startswith("precision_shim")]
    if steps.__module__ in ("torch.optim.adam", "torch.optim.adamw") and not others:
        return DeclaredStates(lambda tensor: tensor.dtype, lambda tensor: tensor.dtype)
    return DeclaredStates()


def _divides(placement: Any) -> bool:
    # ``is_shard()`` is false for FSDP2's shards of tensor-parallel parameters.
    return not (placement.is_replicate() or placement.is_partial())


def _data_sizes(mesh: Any) -> list[int]:
    """Return the size of each dimension of a mesh; 1 for dimensions that divide the model."""
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    return [
        1 if name in _MODEL_PARALLEL else mesh.size(dimension)
        for dimension, name in enumerate(names)
    ]


def _shards(parameter: Any) -> int:
    """Return the number of a DTensor's shards, not counting model-parallel mesh dimensions."""
    sizes = zip(_data_sizes(parameter.device_mesh), parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if _divides(placement))


def _data_parallel_size(
    chunks: Sequence[torch.nn.Module], parameters: Sequence[torch.Tensor]
) -> int:
    for parameter in parameters:
        if hasattr(parameter, "device_mesh"):
            return math.prod(_data_sizes(parameter.device_mesh))
    for chunk in chunks:  # torch's DDP, FSDP1
        group = vars(chunk).get("process_group")
        if group is not None:
            copies = vars(chunk).get("_inter_node_pg")  # FSDP1 with hybrid shards
            return int(group.size()) * (int(copies.size()) if copies is not None else 1)
    return 1


class _Flat(NamedTuple):
    """A parameter of FSDP1: its size before sharding, and its number of shards and of padding."""

    size: int
    shards: int
    padding: int


def _flat_parameters(chunks: Sequence[torch.nn.Module]) -> dict[int, _Flat]:
    """Map the ``id`` of each FSDP1 parameter to its ``_Flat``.

    It is as large as this rank's shard with padding, or, with ``use_orig_params``, as its part of
    the shard. The names are private in torch: if they change, the result is empty.
    """
    found: dict[int, _Flat] = {}
    for module in (module for chunk in chunks for module in chunk.modules()):
        handle, group = (vars(module).get(name) for name in ("_handle", "process_group"))
        flat = getattr(handle, "flat_param", None)
        shapes = getattr(flat, "_shapes", None)
        if flat is None or shapes is None or group is None:
            continue
        shards = int(group.size()) if getattr(handle, "uses_sharded_strategy", True) else 1
        infos = getattr(flat, "_shard_param_infos", None)
        real = [getattr(info, "numel_in_shard", None) or 0 for info in infos or ()]
        padding = 0 if infos is None else flat.numel() - sum(real)
        found[id(flat)] = _Flat(sum(shape.numel() for shape in shapes), shards, padding)
        for parameter, shape in zip(getattr(flat, "_params", None) or (), shapes, strict=False):
            found[id(parameter)] = _Flat(shape.numel(), shards, 0)
    return found


def _padding_of(reading: Reading, flat: Mapping[int, _Flat]) -> dict[int, int]:
    found: dict[int, int] = {}
    for state in reading.owned:
        if id(state.stepped) not in flat or not flat[id(state.stepped)].padding:
            continue
        values = (state.exp_avg, state.exp_avg_sq, *state.other, *gradients_of(state.stepped))
        for tensor in (state.stepped, *values):
            if tensor is not None and tensor.numel() == state.stepped.numel():
                found[id(tensor)] = flat[id(state.stepped)].padding
    return found


def _fsdp2_states(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Yield each module with its state of FSDP2, which has only a private name, or ``None``."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        state = getattr(module, "_get_fsdp_state", None)
        yield module, state() if callable(state) else None


def shards_by_gathered(chunks: Sequence[torch.nn.Module]) -> dict[int, torch.Tensor]:
    """Map the ``id`` of each gathered FSDP2 parameter to this rank's shard of that parameter.

    After a forward without a backward pass, ``parameters()`` of the root module returns gathered
    ones. The names are private in torch: if they change, the result is empty.
    """
    found: dict[int, torch.Tensor] = {}
    for _, state in _fsdp2_states(chunks):
        groups = getattr(state, "_fsdp_param_groups", None) or [
            getattr(state, "_fsdp_param_group", None)
        ]
        for parameter in (one for group in groups for one in getattr(group, "fsdp_params", ())):
            whole = getattr(parameter, "_unsharded_param", None)
            shard = getattr(parameter, "sharded_param", None)
            if whole is not None and shard is not None:
                found[id(whole)] = shard
    return found


def mixed_dtypes(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.dtype]:
    """Map ``COMPUTES`` and ``REDUCES`` to the dtypes of FSDP's mixed precision; may be empty."""
    found: list[dict[str, torch.dtype]] = []
    for module, state in _fsdp2_states(chunks):
        policy = getattr(state, "_mp_policy", None)
        for mixed in (policy, getattr(module, "mixed_precision", None)):
            dtype, sums = (getattr(mixed, f"{name}_dtype", None) for name in ("param", "reduce"))
            if isinstance(dtype, torch.dtype):
                found.append({COMPUTES: dtype, REDUCES: sums or dtype})
    return next((one for one in found if one[COMPUTES] in SIXTEEN_BIT), found[0] if found else {})
