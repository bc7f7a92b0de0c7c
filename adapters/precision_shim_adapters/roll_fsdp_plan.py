"""Plan a worker of ROLL's that trains on FSDP2, by the rules of ROLL's FSDP2 strategy."""

from __future__ import annotations

from typing import Any

import torch

from precision_shim.errors import PlanError
from precision_shim.planning.command import Job
from precision_shim.planning.record import Decided, Problem
from precision_shim.planning.request import Illegal, Plannable
from precision_shim.planning.values import number
from precision_shim.precision.dtypes import name_of, parse_dtype
from precision_shim.scaling import ScalerSettings

from . import roll_fsdp
from .fp16.plan import ShardedModel, scaling

TRAINS = "fsdp2_train"
_NAMES = ("bf16", "bfloat16", "fp16", "float16", "half", "fp32", "float32", "float")
"""Dtype names that ROLL accepts in upper or lower case; it looks up other names in torch."""


def model(job: Job, name: str, worker: Any, where: str) -> Plannable:
    """Read a worker's config into a model that the plan can count.

    Args:
        job: the job.
        name: the worker's key in the config.
        worker: ROLL's config of the worker.
        where: framework and version, for messages.

    Raises:
        PlanError: a value cannot be read, or the plan does not support an option.
    """
    config = worker.strategy_args.strategy_config
    section = f"{name}.strategy_args.strategy_config"
    if number(config.get("ep_size", 1), f"{section}.ep_size", where) > 1:
        raise PlanError(
            f"{where}, {section}.ep_size={config['ep_size']}: expert parallelism on FSDP2 is not "
            "planned. Plan the job with ep_size: 1."
        )
    place = str(worker.device_mapping)
    illegal = [
        *_wrong_dtype(config, name, section, "param_dtype"),
        *_wrong_dtype(config, name, section, "reduce_dtype"),
    ]
    if illegal:
        return Illegal(name, tuple(illegal), place)
    shards = number(config.get("fsdp_size", 1), f"{section}.fsdp_size", where)
    context = number(worker.model_args.ulysses_size or 1, f"{name}.model_args.ulysses_size", where)
    if shards < context:
        key, fault = f"{section}.fsdp_size", f"{shards} is less than ulysses_size={context}"
        illegal.append(Problem("size", name, key, fault, f"Write at least {context}."))
    compute = _read(config, "param_dtype", torch.bfloat16)
    stored = _read(config, "param_dtype", torch.float32)
    scaled = scaling(
        job, compute, roll_fsdp.GROUP, roll_fsdp.OWN, framework_default=ScalerSettings()
    )
    low = f"{section}.param_dtype: ROLL keeps parameters and moments in {stored}, without a master"
    return ShardedModel(
        name,
        job.model(worker.model_args.model_name_or_path),
        worker.world_size,
        stored,
        shards=shards if shards > 1 else 0,  # fsdp_size=1 means all ranks
        context=context,
        compute=compute,
        reduce=_read(config, "reduce_dtype", torch.float32),
        decisions=tuple[Decided, ...](scaled),
        offload=bool(config.get("offload_policy", False)),
        value_head=name == "critic",
        keys={
            "world": f"{name}.device_mapping",
            "shards": f"{section}.fsdp_size",
            "context": f"{name}.model_args.ulysses_size",
        },
        place=place,
        illegal=tuple(illegal),
        notes=(low,) if stored != "fp32" else (),
    )


def _parsed(value: object) -> object:
    if not isinstance(value, str):
        return value
    return parse_dtype(value) if value.lower() in _NAMES else getattr(torch, value, None)


def _wrong_dtype(config: Any, name: str, section: str, key: str) -> list[Problem]:
    value = config.get(key, torch.float32)
    dtype = _parsed(value)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return []
    fault = f"{value!r} names no dtype that ROLL takes; allowed: {', '.join(_NAMES)}"
    return [Problem("dtype", name, f"{section}.{key}", fault, "Write one of them.")]


def _read(config: Any, key: str, default: torch.dtype) -> str:
    dtype = _parsed(config.get(key, default))
    assert isinstance(dtype, torch.dtype)  # checked by ``_wrong_dtype``
    return name_of(dtype)
