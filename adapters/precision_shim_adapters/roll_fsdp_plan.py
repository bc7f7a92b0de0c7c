"""Plan a worker of ROLL's that trains on FSDP2, by the rules of ROLL's FSDP2 strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from precision_shim.errors import PlanError
from precision_shim.planning.command import Job
from precision_shim.planning.record import Decided, Problem
from precision_shim.planning.request import Illegal, Plannable
from precision_shim.planning.shapes import Model
from precision_shim.precision.dtypes import name_of
from precision_shim.scaling import ScalerSettings

from . import roll_fsdp
from .fp16.legality import of_reshard
from .fp16.plan import ShardedModel, scaling
from .roll_legality import of_fsdp

TRAINS = "fsdp2_train"
_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
    **dict.fromkeys(("fp64", "float64"), torch.float64),
}
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
    if _whole(config.get("ep_size", 1), f"{section}.ep_size", where) > 1:
        raise PlanError(
            f"{where}, {section}.ep_size={config['ep_size']}: expert parallelism on FSDP2 is not "
            "planned. Plan the job with ep_size: 1."
        )
    place = str(worker.device_mapping)
    if config.get("param_dtype", "fp32") is None:
        raise PlanError(
            f"{where}, {section}.param_dtype=None: ROLL then takes the dtype of the checkpoint's "
            "weights, which is not planned. Write the dtype's name."
        )
    illegal = [
        *of_fsdp(name, worker),
        *_wrong_dtype(config, name, section, "param_dtype"),
        *_wrong_dtype(config, name, section, "reduce_dtype"),
    ]
    if illegal:
        return Illegal(name, tuple(illegal), place)
    shards = _whole(config.get("fsdp_size", 1), f"{section}.fsdp_size", where)
    split = f"{name}.model_args.ulysses_size"
    context = _whole(worker.model_args.ulysses_size, split, where)
    if shards < context:
        key, fault = f"{section}.fsdp_size", f"{shards} is less than ulysses_size={context}"
        illegal.append(Problem("size", name, key, fault, f"Write at least {context}."))
    counted = job.model(worker.model_args.model_name_or_path)
    ranks = shards if 1 < shards < worker.world_size else worker.world_size
    illegal += of_reshard(
        config.get("reshard_after_forward"), f"{section}.reshard_after_forward", name, ranks
    )
    illegal += _wrong_heads(counted, context, name, split)
    compute = _read(config, "param_dtype", torch.bfloat16)
    reduced = config.get("reduce_dtype", torch.float32) is not None  # null: in the compute dtype
    alone = _read(config, "param_dtype", torch.float32)
    scaled = scaling(
        job, compute, roll_fsdp.GROUP, roll_fsdp.OWN, framework_default=ScalerSettings()
    )
    stored = "fp32" if scaled else alone
    low = f"{section}.param_dtype: ROLL keeps parameters and moments in {stored}, without a master"
    head = worker.model_args.model_type if name == "critic" else None
    return ShardedModel(
        name,
        counted,
        worker.world_size,
        stored,
        alone="" if alone == stored else alone,
        shards=shards if shards > 1 else 0,  # fsdp_size=1 means all ranks
        context=context,
        compute=compute,
        reduce=_read(config, "reduce_dtype", torch.float32) if reduced else compute,
        decisions=tuple[Decided, ...](scaled),
        offload=bool(config.get("offload_policy", False)),
        value_head=head == "auto_token_classification",
        keys={
            "world": f"{name}.device_mapping",
            "shards": f"{section}.fsdp_size",
            "context": split,
        },
        place=place,
        illegal=tuple(illegal),
        notes=(
            *((low,) if stored != "fp32" else ()),
            *_unread(name, worker),
            *(() if head == "auto_token_classification" else frozen(name, worker)),
        ),
    )


def frozen(name: str, worker: Any) -> Iterator[str]:
    """Yield a note if a worker freezes parameters, which the plan counts as trained."""
    if worker.model_args.freeze_module_prefix:
        key = f"{name}.model_args.freeze_module_prefix"
        yield f"{key}: frozen parameters are counted as trained: the bytes are an upper bound"


def _unread(name: str, worker: Any) -> Iterator[str]:
    given = worker.model_args
    if given.model_config_kwargs:
        words = ", ".join(map(str, given.model_config_kwargs))
        yield f"not planned: {name}.model_args.model_config_kwargs ({words})"
    if name == "critic" and given.model_type == "trl":
        yield "not counted: the value head that trl adds; the model keeps its own output layer"


def _whole(value: object, key: str, where: str) -> int:
    """Read a whole number; ROLL fails at numbers with quotes or a decimal point."""
    if type(value) is int:
        return value
    raise PlanError(
        f"{where}, {key}={value!r}: expected a whole number. Write one, without quotes."
    )


def _wrong_heads(model: Model, context: int, name: str, key: str) -> Iterator[Problem]:
    heads, groups = model.number("num_attention_heads"), model.number("num_key_value_heads")
    wrong = heads % context or (groups % context and context % groups) if context > 0 else 0
    if wrong:
        fault = f"{context} ways do not divide {heads} attention and {groups} key-value heads"
        yield Problem("heads", name, key, fault, "Take a divisor of both.")


def _parsed(value: object) -> object:
    if not isinstance(value, str):
        return value
    return _DTYPES.get(value.lower()) or getattr(torch, value, None)


def _wrong_dtype(config: Any, name: str, section: str, key: str) -> list[Problem]:
    value = config.get(key, torch.float32)
    if value is None or _parsed(value) in _DTYPES.values():
        return []
    fault = f"{value!r} names no dtype that ROLL trains in; allowed: {', '.join(_DTYPES)}"
    return [Problem("dtype", name, f"{section}.{key}", fault, "Write one of them.")]


def _read(config: Any, key: str, default: torch.dtype) -> str:
    dtype = _parsed(config.get(key, default))
    assert isinstance(dtype, torch.dtype)  # checked by ``_wrong_dtype``
    return name_of(dtype)
