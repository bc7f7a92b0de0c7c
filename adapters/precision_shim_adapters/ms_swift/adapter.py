"""Adapter for ms-swift on Megatron: optimizer states, gradient bucket and fp16.

ms-swift's Megatron trainers scale their loss, but fail at the first overflow: they turn on the
DDP's check of gradients, and convert a skipped step's gradient norm, ``None``, to a tensor.
``args.loss_scale`` is ms-swift's weighting of tokens, not Megatron's loss scale.
Delete the adapter when ms-swift's Megatron trainers accept a skipped step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from precision_shim.adapting import Call, collect, seam, versioned
from precision_shim.adapting.dtypes import Written, coerce_dtype

from .. import megatron
from ..megatron import ALIGNMENT, APPLYING, BUILDING, GROUP, SCALING
from ..megatron.policy.requested import OVERLAP
from . import rollout

TRAINER = "swift.megatron.trainers.base"
METRICS = "ms-swift metrics"
STATES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_FIELDS = (
    *(megatron.PRECISION_AWARE, *STATES, "optimizer_cpu_offload", "optimizer_cuda_graph"),
    OVERLAP,
)
_HERE: dict[str, Any] = {"group": GROUP, "optional": True}
"""Arguments of the seams; another project's package is also named swift."""
_ALWAYS = ("optimizer", "adam_beta2", "clip_grad", "optimizer_offload_fraction")
"""Arguments whose default may differ from the default of Megatron's OptimizerConfig."""


def read(args: Any) -> megatron.RequestedConfig:
    """Read the user's settings from ms-swift's arguments; a default value does not count as set."""
    defaults = {field.name: coerced(field.default) for field in dataclasses.fields(args)}
    asked = {name: coerced(getattr(args, name)) for name in _FIELDS}
    asked = {name: value for name, value in asked.items() if value != defaults[name]}
    if args.fp8_format is not None:
        asked["fp8_recipe"] = args.fp8_recipe
    lora = args.lora_dtype if args.tuner_type == "lora" else None
    # ms-swift turns accumulate_allreduce_grads_in_fp32 on for a bf16 model with fp32 main grads.
    forced = args.bf16 and coerced(args.main_grads_dtype) is torch.float32
    return megatron.RequestedConfig(
        where=f"{versioned('ms-swift', 'swift')}, megatron's arguments",
        subject="model",
        asked={**asked, **{name: getattr(args, name) for name in _ALWAYS}},
        declared=args.torch_dtype,
        native={torch.float16: {"fp16": True}},
        blockers=("Megatron-FSDP keeps gradients and states in its own buffers",)
        if args.use_megatron_fsdp
        else (),
        distributed=args.use_distributed_optimizer,
        wrote=() if lora is None else (Written("lora_dtype", lora, "params"),),
        bucket_in_fp32=True if args.accumulate_allreduce_grads_in_fp32 and not forced else None,
    )


def coerced(value: Any) -> Any:
    """Turn one of ms-swift's four dtype names into a dtype; return any other value unchanged."""
    return coerce_dtype(value, key="") if value in ("fp32", "bf16", "fp16", "fp8") else value


@seam(
    f"{TRAINER}:BaseMegatronTrainer.__init__",
    BUILDING,
    why="makes the DDP and the optimizer, in two calls",
    relies_on=("prepare_model", "get_optimizer_and_scheduler"),
    **_HERE,
)
def build(call: Call, args: Any) -> None:
    """Record that ms-swift builds a model, with a function that reads ms-swift's arguments."""
    with megatron.building("ms-swift", lambda: read(args)):
        call.proceed()


@seam(
    "megatron.core.optimizer:get_megatron_optimizer",
    (*APPLYING, ALIGNMENT),
    why="ms-swift makes its OptimizerConfig inline, and this call has config and buckets in hand",
    delete_when="ms-swift's arguments have the fields of Megatron's loss scaler",
    aliases=(f"{TRAINER}:get_megatron_optimizer",),
    **_HERE,
)
def set_fields(call: Call, config: Any, model_chunks: Any) -> Any:
    """Write the user's fields and the shim's fields into the OptimizerConfig."""
    return megatron.apply_to_config(call, "ms-swift", config, model_chunks)


@seam(
    f"{TRAINER}:BaseMegatronTrainer.train_step",
    SCALING,
    why="makes a tensor of the gradient norm, which is None where Megatron skipped the step",
    delete_when="ms-swift takes a skipped step",
    relies_on=("reduce_max_stat_across_model_parallel_group",),
    **_HERE,
)
def step(call: Call) -> Any:
    """Treat an overflow as a skipped step with norm NaN; ms-swift then omits the scheduler step."""
    with megatron.skipping(succeeds=False):
        return call.proceed()


@seam(
    f"{TRAINER}:BaseMegatronTrainer.on_log",
    SCALING,
    group=METRICS,
    optional=True,
    why="every trainer of ms-swift reports here",
    relies_on=("_log_callback",),
)
def report(call: Call, logs: dict[str, Any], prefix: str = "") -> Any:
    """Add the loss scale and the number of skipped steps to ms-swift's training metrics."""
    if not prefix:
        call.arguments["logs"] = {**logs, **megatron.metrics(call.instance.optimizer)}
    return call.proceed()


SEAMS = megatron.where_present(
    collect(*megatron.SEAMS, build, set_fields, step, report, rollout), module=TRAINER
)
