"""Read Megatron's optimizers for the audit, even if the shim is off, without importing Megatron.

Megatron's three optimizer classes store parameters differently. ``DistributedOptimizer`` stores
shards of its buffers. ``Float16OptimizerWithFloat16Params`` stores groups of 16-bit parameters, and
fp32 copies of these. ``FP32Optimizer`` stores only the parameters of its inner optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from precision_shim.auditing.reading import (
    SIXTEEN_BIT,
    Owned,
    Reading,
    Wanted,
    gradients_of,
    tensors_of,
    unique,
)
from precision_shim.auditing.torch_reader import read_inner
from precision_shim.precision.dtypes import any_dtype, name_of, read_dtype

from ..buffers import grad_buffers
from ..training.config_dtypes import dtype_fields

_BUCKET = (
    "the optimizer reads the gradients as the bucket has them: set grad_reduce_in_fp32={value} in "
    "the DDP's config, or main_grads_dtype with use_precision_aware_optimizer in the {{source}}"
)
REMEDIES = {
    "main-grads-dtype": _BUCKET.format(value=False),
    "main-grads-dtype fp32": f"{_BUCKET.format(value=True)}, and make no parameters fp32 after the "
    "DDP was built",
    "moment-dtype": "{optimizer}'s inner optimizer was not made with the {component}_dtype that "
    "the {source} has now, or keeps fp32, as with optimizer_cpu_offload: set it where the config "
    "is made, without optimizer_cpu_offload, or leave it out",
    "master-missing": "the optimizer steps {params} parameters themselves, and small updates round "
    "away: set bf16 or fp16 in the OptimizerConfig, so that Megatron keeps masters",
    "master-dtype": "set the field where the OptimizerConfig is made, before the optimizer",
    "master-dtype int16": "whole masters take two bytes per parameter more than the remainders "
    "that store_param_remainders asks for: set use_precision_aware_optimizer where the "
    "OptimizerConfig is made, not on a finished one, or store_param_remainders=False",
    "params-dtype": "the {source} is for another model: set its bf16, fp16 and params_dtype to "
    "what the model is",
    "scaler-missing": "fp16 gradients vanish without one: set fp16=True in the OptimizerConfig, so "
    "that Megatron makes one",
    "router-dtype": "Megatron ignores any other name in the model's moe_router_dtype than {names}: "
    "write one of these before the model is built",
}
"""Maps the code of a contradiction between tensors and OptimizerConfig to the remedy."""


def read_optimizers(chunks: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> list[Reading]:
    """Read single optimizers (no chains), which store parameters too: ``chunks`` may be empty."""
    readings = [_read(chunks, optimizer) for optimizer in optimizers]
    names = {read.name for read in readings}
    experts = "experts" in names or any(
        is_expert(p)
        for chunk in (*chunks, *(c for optimizer in optimizers for c in _own_chunks(optimizer)))
        for p in chunk.parameters()
        if p.requires_grad
    )
    for reading in readings:
        if reading.name == "model" and experts:
            reading.name = "dense"
        if reading.name != "experts":
            every = unique([*chunks, *(c for o in optimizers for c in _own_chunks(o))])
            reading.routers = _routers(every)
            reading.other += _quantized_copies(every)
    return readings


def _routers(chunks: Sequence[Any]) -> dict[tuple[str, str], str]:
    """Map the dtypes in which routers should and do compute to the names that Megatron reads."""
    kind = getattr(sys.modules.get("megatron.core.transformer.moe.router"), "Router", ())
    found = {}
    for router in (module for chunk in chunks for module in chunk.modules()):
        if not isinstance(router, kind):
            continue
        config = router.config
        asked, names = config.moe_router_dtype, dtype_fields(type(config))["moe_router_dtype"]
        half = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None
        known = any_dtype(asked)
        computes = name_of((known if asked in names else half) or router.weight.dtype)
        should = computes if asked is None else name_of(known) if known else str(asked)
        found[should, computes] = " and ".join(names)
    return found


def _quantized_copies(chunks: Sequence[Any]) -> list[torch.Tensor]:
    """The copies that TransformerEngine's modules keep of weights that they quantize."""
    modules = unique(module for chunk in chunks for module in chunk.modules())
    kept = (vars(module).get("_fp8_workspaces") or {} for module in modules)
    return [one for copies in kept for one in copies.values() if isinstance(one, torch.Tensor)]


def is_expert(parameter: Any) -> bool:
    """Whether a parameter belongs to an expert; experts have a data-parallel group of their own."""
    return not getattr(parameter, "allreduce", True)


def _own_chunks(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "model_chunks", None) or ())


def _read(chunks: Sequence[Any], optimizer: Any) -> Reading:
    inner = getattr(optimizer, "optimizer", None)
    kind = type(optimizer).__name__
    scaler = getattr(optimizer, "grad_scaler", None)
    reading = Reading("megatron-core", "model", kind, scaler=scaler)
    reading.other += tensors_of(optimizer)  # tensors such as the overflow flag
    if reading.scaler is not None:
        reading.other += tensors_of(reading.scaler)
    config = getattr(optimizer, "config", None)
    if config is not None:
        reading.wanted = read_wanted(lambda name: getattr(config, name, None))
    if inner is None:  # a frozen model's optimizer is a stub
        return reading
    pairs = list(_pairs(optimizer, inner))
    buffers = list(getattr(optimizer, "buffers", None) or ())
    trained = [model for model, _ in pairs]
    reading.trainable = unique(p for b in buffers for p in b.params) if buffers else unique(trained)
    if reading.trainable and all(is_expert(p) for p in reading.trainable):
        reading.name = "experts"
    if not buffers:
        known = {id(p) for p in reading.trainable}
        all_buffers = grad_buffers([*chunks, *_own_chunks(optimizer)])
        buffers = unique(b for b in all_buffers if any(id(p) in known for p in b.params))
    for buffer in buffers:
        reading.buckets += filter(torch.is_tensor, [buffer.grad_data])
        reading.local_sums += getattr(buffer, "extra_main_grads", None) or ()
        data = getattr(buffer, "param_data", None)
        # Frameworks that offload parameters keep copies in ``param_data_cpu`` and ``cpu_data``.
        copies = (getattr(buffer, "param_data_cpu", None), getattr(data, "cpu_data", None))
        reading.also_params += [one for one in (data, *copies) if isinstance(one, torch.Tensor)]
    sums = "main_grad_copy_in_grad_buffer"  # beside it ``main_grad`` is a sum in fp32
    views = ((p, getattr(p, sums, getattr(p, "main_grad", None))) for p in reading.trainable)
    reading.bucket_views = {id(p): view for p, view in views if view is not None}
    _read_states(reading, inner, pairs)
    dtypes = {p.dtype for p in trained}
    own = getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
    in_bucket = {view.dtype for view in reading.bucket_views.values()}
    in_fp32 = bool(reading.local_sums) or in_bucket == {torch.float32}
    makes_copies = bool(dtypes & set(SIXTEEN_BIT)) and not in_fp32
    reading.copies_later = makes_copies and not own and reading.declared_states.exp_avg is not None
    reading.data_parallel_size = _data_parallel_size(optimizer, buffers, reading.name)
    meshed = any(hasattr(p, "device_mesh") for p in reading.trainable)  # Megatron-FSDP
    reading.sharded = reading.owned_parameters < reading.parameters
    reading.sharded |= meshed and reading.data_parallel_size > 1
    reading.params_sharded = meshed and reading.sharded
    return reading


def _pairs(optimizer: Any, inner: Any) -> Iterable[tuple[Any, Any]]:
    """Pair each parameter with its tensor in the inner optimizer's groups (fp32 tensors first)."""
    groups = inner.param_groups
    fp32 = getattr(optimizer, "model_fp32_groups", None)
    halves = getattr(optimizer, "model_float16_groups", None)
    if fp32 is not None and halves is not None:
        for whole, half, group in zip(fp32, halves, groups, strict=False):
            yield from zip((*whole, *half), group["params"], strict=False)
        return
    model_of = {}
    halves = getattr(optimizer, "float16_groups", None)
    copies = getattr(optimizer, "fp32_from_float16_groups", None)
    for half, copy in zip(halves or (), copies or (), strict=False):
        model_of.update({id(b): a for a, b in zip(half, copy, strict=False)})
    for group in groups:
        for p in group["params"]:
            yield model_of.get(id(p), p), p


def _read_states(reading: Reading, inner: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
    # Megatron's optimizer for CPU offload has inner optimizers for copies of the parameters.
    beneath = getattr(inner, "param_to_inner_param", None) or {}
    steppers = list(getattr(inner, "sub_optimizers", None) or ())
    states = {id(p): state for stepper in steppers for p, state in stepper.state.items()}
    for model, stepped in pairs:
        lower = beneath.get(stepped, stepped)
        lowered = [lower] if lower is not stepped else []
        masters = [stepped, *lowered] if stepped.dtype != model.dtype else lowered
        masters = [one for one in masters if one.dtype not in SIXTEEN_BIT]
        owned = Owned(model.dtype, stepped, tuple(masters), parameter=model)
        state = states.get(id(lower)) if steppers else None
        owned.take(inner.state.get(stepped, {}) if state is None else state)
        reading.owned.append(owned)
        for each in (stepped, *lowered):
            reading.gradients += gradients_of(each)
    # ``cpu_copy_map_grad`` may contain gradients of parameters that a load has replaced.
    reading.gradients += list((getattr(inner, "cpu_copy_map_grad", None) or {}).values())
    reading.gradients += [grad for p in reading.trainable for grad in gradients_of(p)]
    read_inner(reading, inner)
    for each in steppers:
        read_inner(reading, each)
    told = reading.declared_states
    if beneath and told.exp_avg is not None and told.exp_avg_sq is not None:
        # The inner optimizers have states for copies of the parameters: map parameters to copies.
        first, second = told.exp_avg, told.exp_avg_sq
        reading.declared_states = replace(
            told,
            exp_avg=lambda parameter: first(beneath.get(parameter, parameter)),
            exp_avg_sq=lambda parameter: second(beneath.get(parameter, parameter)),
        )


def _data_parallel_size(optimizer: Any, buffers: Sequence[Any], name: str) -> int:
    group = getattr(optimizer, "data_parallel_group", None)
    if group is None and buffers:
        group = getattr(buffers[0], "data_parallel_group", None)
    if group is not None:
        return int(group.size())
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return 1
    if name == "experts":
        return int(state.get_expert_data_parallel_world_size())
    return int(state.get_data_parallel_world_size(with_context_parallel=True))


def adam_keeps_masters(field: Callable[[str], Any], main: torch.dtype) -> bool:
    """Whether FusedAdam itself keeps a precision-aware optimizer's masters, of the dtype ``main``.

    With CPU offload, or an fp8 recipe other than delayed, whole masters are outside FusedAdam.
    ``field`` reads a field of the OptimizerConfig; ``None`` for a missing field.
    """
    recipes = (None, "delayed")
    offload = bool(field("optimizer_cpu_offload"))
    return not offload and (main is not torch.float32 or field("fp8_recipe") in recipes)


def read_wanted(field: Callable[[str], Any]) -> Wanted:
    """The tensors' dtypes that the current fields of an OptimizerConfig imply.

    ``field`` reads a field; ``None`` if missing. Megatron derives settings only once: if a field is
    set later, they stay as they were, and the audit reports the difference.
    """

    def dtype(name: str) -> Any:
        value = read_dtype(field(f"{name}_dtype"))  # names stay if dtype-coercion is not in force
        return fp32 if value is None else value

    fp32 = torch.float32
    params = dtype("params")
    if field("fp16") or field("bf16"):
        params = torch.float16 if field("fp16") else torch.bfloat16
    aware = field("use_precision_aware_optimizer")
    main, main_grads, exp_avg, exp_avg_sq = (
        dtype(name) if aware else fp32
        for name in ("main_params", "main_grads", "exp_avg", "exp_avg_sq")
    )
    remainders = aware and main is fp32 and adam_keeps_masters(field, main)
    remainders = remainders and field("store_param_remainders") is not False
    return Wanted(
        "OptimizerConfig",
        params=params,
        main_grads=main_grads,
        masters={torch.float16: main, torch.bfloat16: torch.int16 if remainders else main},
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        remedies=REMEDIES,
    )
