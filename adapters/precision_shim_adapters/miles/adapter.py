"""Adapter for miles on Megatron-core: optimizer states, fp16, and a count of skipped steps.

Like slime, miles calls ``prepare_grads`` twice in a step. Unlike slime, miles may have no
optimizer, and reports a skipped step with a grad norm of 0.0. Muon and the optimizers of several
LoRA adapters come from other functions, and never train in fp16.
Delete this module when miles calls ``prepare_grads`` once, and reports loss scale and skips.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from precision_shim.adapting import Call, collect, seam, versioned

from .. import megatron
from ..agreement import sglang_flags
from ..megatron import ALIGNMENT, APPLYING, BUILDING, GROUP, SCALING

MODEL = "miles.backends.megatron_utils.model"
MAKE = "megatron.core.optimizer:get_megatron_optimizer"
USED = f"{MODEL}:get_megatron_optimizer"
HERE: dict[str, Any] = {
    "group": GROUP,
    "optional": True,
    "delete_when": "miles prepares its gradients once, and reports skipped steps",
}
NEED_MASTERS = (
    "rematerialize_param_from_master_weight",
    "stream_optimizer_state_to_disk",
    "enable_witness",
    "save_local_weight_checksum",
)
"""Flags of miles with which miles reads Megatron's own fp32 masters."""


def read(args: Any, role: str) -> megatron.RequestedConfig:
    """Read one role's flags into ``RequestedConfig``."""
    written = [name for name in NEED_MASTERS if getattr(args, name, False)]
    blockers = [f"miles' {name} reads Megatron's own fp32 masters" for name in written]
    requested = megatron.requested_by_flags(args, f"{versioned('miles')}, flags", role, blockers)
    if getattr(args, "debug_disable_optimizer", False):  # no flag of the optimizer has an effect
        requested = replace(requested, asked={}, optimizer="adam")
    return requested


@seam(f"{MODEL}:setup_model_and_optimizer", BUILDING, why="makes bucket and optimizer", **HERE)
def build(call: Call, args: Any, role: str = "actor") -> Any:
    """Record that miles builds a model, with a function that reads miles' flags."""
    with megatron.building("miles", lambda: read(args, role)):
        return call.proceed()


@seam(megatron.CONFIG_INIT, APPLYING, why="miles makes its config inline", **HERE)
def configure(call: Call) -> Any:
    """Write the fields that the shim chose into the OptimizerConfig that miles makes."""
    return megatron.fill_inline(call, "miles")


@seam(MAKE, ALIGNMENT, why="gets config and buckets", aliases=(USED,), **HERE)
def check(call: Call, config: Any, model_chunks: Any) -> Any:
    """Compare the OptimizerConfig with the live model before miles makes the optimizer."""
    if megatron.current_build("miles") is not None:
        megatron.check("miles", config, model_chunks)
    return call.proceed()


@seam(f"{MODEL}:train_one_step", SCALING, why="asserts that a step was not skipped", **HERE)
def step(call: Call, optimizer: Any) -> tuple[dict[str, Any], Any, Any]:
    """Count an overflow as a skipped step with grad norm NaN; report loss scale and skips."""
    before = megatron.metrics(optimizer)
    with megatron.skipping(succeeds=True):
        losses, norm, outcome = call.proceed()
    figures = megatron.metrics(optimizer)
    if figures.get("skipped_steps", 0.0) > before.get("skipped_steps", 0.0):
        norm = math.nan
    return {**losses, **figures}, norm, outcome


SEAMS = megatron.where_present(
    collect(megatron.SEAMS, build, configure, check, step, sglang_flags.seams("miles")),
    module=MODEL,
)
