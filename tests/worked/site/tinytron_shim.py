"""precision_shim for tinytron: dtype names, states and bucket by the model's dtype, fp16.

Entered around the whole build, because the bucket is made before the OptimizerConfig. The
backend's seams enter Megatron's own classes. Delete when: tinytron decides all of it in one place.
"""

from dataclasses import replace
from typing import Any

import torch

from precision_shim.adapting import Adapter, Call, collect, seam
from precision_shim_adapters import megatron
from precision_shim_adapters.megatron import ALIGNMENT, APPLYING, BUILDING, GROUP, SCALING

TRAINER = "tinytron.trainer"


def read(config: Any) -> megatron.RequestedConfig:
    """What a user of tinytron asks for."""
    return megatron.RequestedConfig(
        where="tinytron, optimizer",
        subject="model",
        asked=config.optimizer,
        declared=getattr(torch, config.precision),
        native={torch.float16: {"fp16": True}},  # tinytron itself sets the flag
        bucket_in_fp32=config.ddp.get("grad_reduce_in_fp32"),
        nan_check_written="check_for_nan_in_grad" in config.ddp,
    )


@seam(f"{TRAINER}:Trainer.build", BUILDING, group=GROUP, why="makes the bucket and the optimizer")
def build(call: Call) -> None:
    """Record that a model is being built, and how to read its config."""
    config = call.instance.config
    with megatron.building("tinytron", lambda: read(config)):
        call.proceed()


@seam(f"{TRAINER}:optimizer_config", APPLYING, group=GROUP, why="makes every OptimizerConfig")
def configure(call: Call, config: Any) -> Any:
    """Put the planned fields into the config; what the user wrote is among them."""
    around = megatron.current_build("tinytron") or megatron.Build("tinytron", lambda: read(config))
    plan = megatron.apply_plan(around)
    call.arguments["config"] = replace(config, optimizer=plan.fields)
    made = call.proceed()
    megatron.keep_layout(plan, made)
    return made


@seam(f"{TRAINER}:make_optimizer", ALIGNMENT, group=GROUP, why="has config and buckets in hand")
def check(call: Call, config: Any, model: Any) -> Any:
    """Compare the config with the live model before the optimizer is made."""
    megatron.check("tinytron", config, model)
    return call.proceed()


@seam(
    f"{TRAINER}:Trainer.train_step", SCALING, group=GROUP, why="takes a skipped step for a failure"
)
def step(call: Call) -> dict[str, float]:
    """Let an overflow be a skipped step, and report both figures."""
    with megatron.skipping(succeeds=True):
        found = call.proceed()
    return {**found, **megatron.metrics(call.instance.optimizer)}


ADAPTER = Adapter(
    "tinytron",
    "tinytron",
    packages=("tinytron",),
    tested=("1.0",),
    effects=megatron.EFFECTS,
    seams=collect(*megatron.SEAMS, build, configure, check, step),
    paths={**megatron.PATHS, GROUP: "trainer"},
)
