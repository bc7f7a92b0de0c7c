"""The shim's adapter for proof_trainer: dtype names, dtypes of states and bucket, fp16.

A seam encloses the whole build, because the bucket is made before the OptimizerConfig. The
backend's seams patch Megatron's own classes.
"""

from dataclasses import replace
from typing import Any

import torch

from precision_shim.adapting import Adapter, Call, collect, seam
from precision_shim_adapters import megatron
from precision_shim_adapters.megatron import ALIGNMENT, APPLYING, BUILDING, GROUP, SCALING

NAME = "proof-trainer"
TRAINER = "proof_trainer.trainer"


def read(config: Any) -> megatron.RequestedConfig:
    """Read the trainer's config into a ``RequestedConfig``."""
    return megatron.RequestedConfig(
        where=f"{NAME}, optimizer",
        subject="model",
        asked=config.optimizer,
        declared=getattr(torch, config.precision),
        native={torch.float16: {"fp16": True}},  # fields that the trainer itself sets
        bucket_in_fp32=config.ddp.get("grad_reduce_in_fp32"),
        nan_check_written="check_for_nan_in_grad" in config.ddp,
    )


@seam(f"{TRAINER}:Trainer.build", BUILDING, group=GROUP, why="makes the bucket and the optimizer")
def build(call: Call) -> None:
    """Announce that a model is being built, and pass the function that reads its config."""
    config = call.instance.config
    with megatron.building(NAME, lambda: read(config)):
        call.proceed()


@seam(f"{TRAINER}:optimizer_config", APPLYING, group=GROUP, why="makes every OptimizerConfig")
def configure(call: Call, config: Any) -> Any:
    """Put the planned optimizer fields into the config; they include the user's fields."""
    around = megatron.current_build(NAME) or megatron.Build(NAME, lambda: read(config))
    plan = megatron.apply_plan(around)
    call.arguments["config"] = replace(config, optimizer=plan.fields)
    made = call.proceed()
    megatron.keep_layout(plan, made)
    return made


@seam(f"{TRAINER}:make_optimizer", ALIGNMENT, group=GROUP, why="has config and buckets in hand")
def check(call: Call, config: Any, model: Any) -> Any:
    """Compare the config with the live model before the optimizer is made."""
    megatron.check(NAME, config, model)
    return call.proceed()


@seam(f"{TRAINER}:Trainer.update", SCALING, group=GROUP, why="takes a skipped step for a failure")
def step(call: Call) -> dict[str, float]:
    """Make a skipped step count as successful, and add loss scale and skipped steps."""
    with megatron.skipping(succeeds=True):
        found = call.proceed()
    return {**found, **megatron.metrics(call.instance.optimizer)}


ADAPTER = Adapter(
    NAME,
    NAME,
    packages=("proof_trainer",),
    tested=("1.0",),
    effects=megatron.EFFECTS,
    seams=collect(*megatron.SEAMS, build, configure, check, step),
    paths={**megatron.PATHS, GROUP: "trainer"},
)
