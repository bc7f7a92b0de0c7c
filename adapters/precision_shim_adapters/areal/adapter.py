"""precision_shim for AReaL: dtype names, dtypes of the optimizer's states, and fp16.

AReaL's MegatronEngine sets the states' dtypes after Megatron has validated its OptimizerConfig, so
derived fields are wrong; AReaL's loss scaler settings do not reach Megatron. AReaL itself scales
its loss and accepts a skipped step. Its FSDP and Archon engines stay unchanged.
Delete the adapter when AReaL passes the dtypes to the constructor of OptimizerConfig.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from precision_shim.adapting import Call, collect, seam, versioned
from precision_shim.adapting.dtypes import Written, coerce_dtype

from .. import megatron
from ..megatron import ALIGNMENT, APPLYING, BUILDING, GROUP, SCALING
from ..megatron.policy.requested import OVERLAP, SETS
from . import rollout

ENGINE = "areal.engine.megatron_engine"
STATES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_SCALER = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
OF_ADAM = {"optimizer": "type", "adam_beta2": "beta2", "clip_grad": "gradient_clipping"}
"""Maps fields of Megatron's OptimizerConfig to keys of AReaL's ``optimizer`` section."""

_OWN = {"dtype": "params", "grad_reduce_dtype": "grad_buckets", "optimizer_dtype": "exp_avg"}
"""Maps AReaL's dtype keys for all engines to what they set; its Megatron engine reads ``dtype``."""
_NEEDS = {
    "grad_reduce_dtype": "megatron.ddp.grad_reduce_in_fp32=false",
    "optimizer_dtype": "megatron.exp_avg_dtype and megatron.exp_avg_sq_dtype",
}


def read(engine: Any) -> megatron.RequestedConfig:
    """Read the user's settings of an AReaL engine; a default value does not count as set."""
    ours, theirs = engine.optimizer_config, engine.mcore_config
    asked: dict[str, Any] = {}
    if ours is not None:
        asked = {name: getattr(ours, key) for name, key in OF_ADAM.items()}
        asked.update(_written(ours, _SCALER))
    asked.update(_written(theirs, (megatron.PRECISION_AWARE, *STATES, OVERLAP)))
    if theirs.fp8_config is not None:
        asked["fp8_recipe"] = theirs.fp8_config.recipe
    ddp = _written(theirs.ddp, ("grad_reduce_in_fp32", "check_for_nan_in_grad"))
    return megatron.RequestedConfig(
        where=f"{versioned('areal')}, megatron and optimizer",
        subject="critic" if engine.config.is_critic else "actor",
        asked=asked,
        declared=engine.dtype,
        native={torch.float16: {"fp16": True}},
        distributed=not engine.config.use_lora and theirs.ddp.use_distributed_optimizer,
        bucket_in_fp32=ddp.get("grad_reduce_in_fp32"),
        nan_check_written="check_for_nan_in_grad" in ddp,
        trains=ours is not None,
    )


def written(engine: Any) -> Iterator[Written]:
    """Yield AReaL's dtype keys that differ from their defaults, before ``initialize`` changes them.

    ``adam_bf16`` replaces the dtypes of model and moments.
    """
    config, role = engine.config, "critic" if engine.config.is_critic else "actor"
    for key, sets in _OWN.items():
        for name, value in _written(config, (key,)).items():
            yield Written(f"{role}.{name}", value, sets, _NEEDS.get(name, ""))
    if config.optimizer is not None and config.optimizer.type == "adam_bf16":
        needs = f"{role}.optimizer.type=adam"
        for name, value in _written(config.megatron, STATES).items():
            yield Written(f"{role}.megatron.{name}", value, SETS[name], needs)


def _written(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value != defaults[name]}


@seam(
    f"{ENGINE}:MegatronEngine.__init__",
    "dtype-coercion",
    group=GROUP,
    why="the engine later takes torch's attribute of the four names that its config has",
    delete_when="AReaL takes dtype names under megatron, as it does for dtype",
    relies_on=("mcore_config",),
)
def name_dtypes(call: Call, config: Any) -> None:
    """Pass the engine a config in which the optimizer states' dtypes have torch's names."""
    where, theirs = versioned("areal"), config.megatron
    dtypes = {
        name: coerce_dtype(getattr(theirs, name), key=f"megatron.{name}", where=where)
        for name in STATES
    }
    names = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
    if names != {name: getattr(theirs, name) for name in STATES}:
        config, inner = copy.copy(config), copy.copy(theirs)
        vars(inner).update(names)
        config.megatron = inner
        call.arguments["config"] = config
    call.proceed()


@seam(f"{ENGINE}:MegatronEngine.initialize", BUILDING, group=GROUP, why="around DDP and optimizer")
def build(call: Call) -> None:
    """Record that a model is being built, and how to read its config."""
    wrote = tuple(written(call.instance))
    with megatron.building("areal", lambda: replace(read(call.instance), wrote=wrote)):
        call.proceed()


@seam(
    "megatron.core.optimizer:get_megatron_optimizer",
    (*APPLYING, ALIGNMENT),
    group=GROUP,
    why="AReaL makes its OptimizerConfig inline, and this call has config and buckets in hand",
    delete_when="AReaL passes the fields to OptimizerConfig's constructor",
    aliases=(f"{ENGINE}:get_megatron_optimizer",),
)
def set_fields(call: Call, config: Any, model_chunks: Any) -> Any:
    """Copy the config, set the fields that the shim chose, and validate the copy."""
    return megatron.apply_to_config(call, "areal", config, model_chunks, stale=True)


@seam(
    f"{ENGINE}:MegatronEngine.optimizer_step",
    SCALING,
    group=GROUP,
    why="what it returns goes into AReaL's statistics",
)
def step(call: Call) -> dict[str, float]:
    """Accept a skipped step, and add loss scale and skipped steps to AReaL's statistics."""
    with megatron.skipping(succeeds=False):
        statistics: dict[str, float] = call.proceed()
    return {**statistics, **megatron.metrics(call.instance.optimizer)}


SEAMS = collect(*megatron.SEAMS, name_dtypes, build, set_fields, step, rollout)
