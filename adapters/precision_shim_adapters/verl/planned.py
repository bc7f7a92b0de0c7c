"""For a plan, read the dtypes in which verl's engines other than Megatron store and compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from precision_shim.adapting import versioned
from precision_shim.errors import PlanError
from precision_shim.precision.dtypes import parse_dtype

from ..fp16.names import own_dtype
from . import automodel, engines, fsdp, titan, veomni

_TURBOS = ("distributed", "fsdp_plan", "param_dtype")


@dataclass(frozen=True)
class Sharded:
    """An engine's dtypes and sizes.

    Attributes:
        stored: dtype of the parameters.
        compute: dtype in which the parameters are gathered.
        reduce: dtype of the gradients while they are reduced.
        because: why the shim scales an fp16 model's loss.
        group: the group of the seams that scale the model's loss.
        sizes: maps a field of ``ShardedModel`` to the key that sets it in the engine's section.
        note: why the engine does not compute in float16 although the config has float16.
    """

    stored: torch.dtype
    compute: torch.dtype
    because: str
    group: str
    reduce: torch.dtype = torch.float32
    sizes: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def read_sharded(
    strategy: str, engine: Mapping[str, Any], key: str, *, group: str, subject: str, trains: bool
) -> Sharded:
    """Read an engine's section.

    Args:
        strategy: verl's name of the engine.
        engine: the engine's section.
        key: the config's key of the engine's section.
        group: ``fsdp.ENGINE`` or ``fsdp.LEGACY``; read only if the engine is FSDP.
        subject: the model's name, such as ``"actor"``.
        trains: whether the model has an optimizer.

    Raises:
        DtypeError: verl does not accept a dtype, or cannot train in the dtype.
        PlanError: the plan cannot compute the engine's parallelism, or cannot find its dtype.
    """
    for degree in ("expert_parallel_size", "ep_size", "pipeline_parallel_size", "pp_size"):
        if (engine.get(degree) or 1) != 1:
            raise PlanError(
                f"{versioned('verl')}, {key}.{degree}={engine[degree]}: planned are data, tensor "
                f"and context parallelism of its {strategy} engine. Set {key}.{degree}=1."
            )
    low = torch.float16 if engines.is_fp16(engine.get("dtype")) else torch.bfloat16
    ignores = {"veomni": engines.VEOMNI, "torchtitan": engines.TITAN}.get(strategy)
    why = engines.refusal(ignores) if ignores and low is torch.float16 else ""
    note = f"dtype=float16 is not what it trains in, but bfloat16: {why}" if why else ""
    if note:
        low = torch.bfloat16
    if strategy == "veomni":
        if low is torch.float16:
            veomni.check_fp16(engine, key)
        stored = torch.float32 if engine.get("mixed_precision") else torch.bfloat16
        sizes = {"shards": "fsdp_size", "context": "ulysses_parallel_size"}
        of_it = engines.GROUPS[engines.VEOMNI]
        return Sharded(stored, low, veomni.BECAUSE, of_it, sizes=sizes, note=note)
    if strategy == "torchtitan":
        sizes = {
            "shards": "data_parallel_shard_size",
            "tensor": "tensor_parallel_size",
            "context": "context_parallel_size",
        }
        of_it = engines.GROUPS[engines.TITAN]
        return Sharded(torch.float32, low, titan.BECAUSE, of_it, sizes=sizes, note=note)
    if strategy == "automodel":
        names = ("model_dtype", "mp_param_dtype", "mp_reduce_dtype")
        values = (engine.get(name) for name in names)
        stored, compute, reduce = (
            own_dtype(value or default, f"{key}.{field}", versioned("verl"))
            for field, value, default in zip(names, values, ("fp32", "bf16", "fp32"), strict=True)
        )
        if compute is torch.float16:
            automodel.check_fp16(engine, key)
        sizes = {"tensor": "tp_size", "context": "cp_size", "replicas": "dp_replicate_size"}
        of_it = engines.GROUPS[engines.AUTOMODEL]
        return Sharded(stored, compute, automodel.BECAUSE, of_it, reduce, sizes)
    stored = fsdp.model_dtype({"forward_only": not trains, **engine}, key)
    sizes = {"shards": "fsdp_size", "context": "ulysses_sequence_parallel_size"}
    if strategy == "fsdp_turbo":
        turbo: Any = engine.get("turbo_config")
        for name in _TURBOS:
            turbo = turbo.get(name) if isinstance(turbo, Mapping) else None
        dtype = parse_dtype(str(turbo))
        if dtype is None:
            place = f"{key}.turbo_config.{'.'.join(_TURBOS)}"
            raise PlanError(
                f"{versioned('verl')}: {place}={turbo!r} is no dtype, and FSDP Turbo's default is "
                f"not known here. Set {place}."
            )
        of_it = engines.GROUPS[engines.TURBO]
        return Sharded(stored, dtype, engines.TURBO_BECAUSE, of_it, sizes=sizes)
    mixed = fsdp.mixed_dtypes(engine, key)
    compute = mixed.get("param_dtype", torch.bfloat16)
    if group == fsdp.LEGACY and subject == "actor":
        compute = fsdp.of_legacy_actor(engine, compute, key)
    reduce = mixed.get("reduce_dtype", torch.float32)
    return Sharded(stored, compute, fsdp.scaled_because(), group, reduce, sizes)
