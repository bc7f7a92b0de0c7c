"""Adapter for ROLL on Megatron-core: loss scaling for fp16, and a count of skipped steps.

ROLL never sets ``grad_scale_func``, so Megatron divides the gradients by a loss scale by which no
loss was multiplied. ROLL's offload packs all states of an optimizer into one buffer of one dtype,
so they stay fp32. mcore_adapter's trainer, which scales the loss, is not patched.
Delete this module when ROLL scales its loss on Megatron, and accepts and reports a skipped step.
"""

from __future__ import annotations

from typing import Any

import torch

from precision_shim.adapting import Call, collect, seam, versioned

from .. import megatron
from ..megatron import ALIGNMENT, APPLYING, BUILDING, GROUP, SCALING
from . import audit, rollout, training

MODULE = "roll.distributed.strategy.megatron_strategy"
STRATEGY = f"{MODULE}:MegatronTrainStrategy"
MAKE = "roll.third_party.megatron.optimizer:get_megatron_optimizer"
USED = f"{MODULE}:get_megatron_optimizer"
OFFLOAD = "ROLL's offload moves all states of an optimizer in one dtype"
HERE: dict[str, Any] = {
    "group": GROUP,
    "optional": True,  # another PyPI project also has a package ``roll``
    "delete_when": "ROLL scales its loss on Megatron, and takes a skipped step",
}


def read(strategy: Any) -> megatron.RequestedConfig:
    """Read ROLL's config into ``RequestedConfig``; ROLL passes no optimizer dtype to Megatron."""
    args = strategy.megatron_train_args
    written = strategy.worker_config.strategy_args.strategy_config
    dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    bucket = written.get("accumulate_allreduce_grads_in_fp32")
    return megatron.RequestedConfig(
        where=f"{versioned('roll', called='ROLL')}, strategy_config",
        subject=strategy.worker_config.name,
        asked={"adam_beta2": args.adam_beta2},
        declared=dtype,
        auto="guarded",
        native={torch.float16: {"fp16": True}},
        blockers=(OFFLOAD,),
        optimizer=str(args.optimizer),
        distributed=bool(args.use_distributed_optimizer),
        # For a bf16 model ROLL overwrites the user's ``accumulate_allreduce_grads_in_fp32``.
        bucket_in_fp32=None if bucket is None or args.bf16 else bool(bucket),
        nan_check_written="check_for_nan_in_loss_and_grad" in written,
        wrote=tuple(training.written(strategy)),
    )


@seam(f"{STRATEGY}.initialize", BUILDING, why="makes bucket and optimizer", **HERE)
def build(call: Call) -> Any:
    """Record that ROLL builds a model, with a function that reads ROLL's config."""
    with megatron.building("roll", lambda: read(call.instance)):
        return call.proceed()


@seam(f"{STRATEGY}.initialize", SCALING, why="its optimizer's scale reaches no loss", **HERE)
def scale(call: Call) -> Any:
    """Set ``grad_scale_func`` in the model's config, so that Megatron scales the loss."""
    result = call.proceed()
    strategy = call.instance
    for chunk in strategy.models_wrapped if strategy.megatron_train_args.fp16 else ():
        if chunk.config.grad_scale_func is None:
            chunk.config.grad_scale_func = strategy.optimizer.scale_loss
    return result


@seam(megatron.CONFIG_INIT, APPLYING, why="ROLL makes its config inline", **HERE)
def configure(call: Call) -> Any:
    """Write the fields that the shim chose into the OptimizerConfig that ROLL makes."""
    return megatron.fill_inline(call, "roll")


@seam(MAKE, ALIGNMENT, why="gets config and buckets", aliases=(USED,), **HERE)
def check(call: Call, config: Any, model_chunks: Any) -> Any:
    """Compare the OptimizerConfig with the live model before ROLL makes the optimizer."""
    megatron.check("roll", config, model_chunks)
    return call.proceed()


@seam(f"{STRATEGY}.train_step", SCALING, why="raises an error at a skipped step", **HERE)
def step(call: Call) -> dict[str, Any]:
    """Count an overflow as a skipped step, and report loss scale and skipped steps."""
    strategy = call.instance
    with megatron.skipping(succeeds=True):
        found = call.proceed()
    return {**found, **megatron.metrics(strategy.optimizer, f"{strategy.worker_config.name}/")}


SEAMS = megatron.where_present(
    collect(*megatron.SEAMS, build, scale, configure, check, step, training, audit, rollout),
    module=MODULE,
)
