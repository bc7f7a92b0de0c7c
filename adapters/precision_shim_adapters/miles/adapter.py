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
from precision_shim.adapting.dtypes import Written

from .. import megatron
from ..common import sglang_flags
from ..megatron import GROUP, SCALING

MODEL = "miles.backends.megatron_utils.model"
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
"""Flags of miles with which miles reads Megatron's fp32 masters."""

_ON_DISK = "stream_optimizer_state_moment_dtype"
"""Flag of miles: the moments' dtype on the disk to which miles streams the optimizer's state."""


def read(args: Any, role: str) -> megatron.RequestedConfig:
    """Read one role's flags into ``RequestedConfig``."""
    written = [name for name in NEED_MASTERS if getattr(args, name, False)]
    blockers = tuple(f"miles' {name} reads Megatron's own fp32 masters" for name in written)
    requested = megatron.requested_by_flags(args, f"{versioned('miles')}, flags", role, blockers)
    moments = getattr(args, _ON_DISK, "fp32")
    if moments != "fp32" and not getattr(args, NEED_MASTERS[1], False):
        flag = Written(_ON_DISK, moments, needs=NEED_MASTERS[1])
        requested = replace(requested, wrote=(flag,))
    if getattr(args, "debug_disable_optimizer", False):  # no flag of the optimizer has an effect
        requested = replace(requested, asked={}, optimizer="adam")
    return requested


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


BUILDING = megatron.building_seams("miles", MODEL, read, **HERE)
SEAMS = megatron.where_present(
    collect(megatron.SEAMS, BUILDING, step, sglang_flags.seams("miles")), module=MODEL
)
