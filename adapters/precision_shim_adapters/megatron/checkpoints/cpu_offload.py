"""Resume Megatron's optimizer for CPU offload exactly, if the user made it precision-aware.

``HybridDeviceOptimizer`` updates copies of the parameters with inner optimizers: torch's AdamW on
the host, FusedAdam on the GPU. Before a load, ``dummy_step``, a step on random gradients, makes its
states. Megatron 0.15 to 0.19 then loads a checkpoint into the outer optimizer's states, and
silently does not copy some of them to the inner optimizers:

- With ``dp_reshardable`` (which 0.15 cannot save), AdamW's step counts are 1 after a resume. SkyRL
  corrects this itself, but only in its own processes.
- With ``dp_zero_gather_scatter``, the parameters' copies keep the values from ``dummy_step``.
- With every sharding type, FusedAdam's step count stays the checkpoint's plus 1, because each step
  overwrites the inner optimizers' groups with the loaded groups.
- If no state is on the host, Megatron saves no step count, and FusedAdam counts from 1 again.

Delete this module when tests/audit/test_offload_resume.py fails, since Megatron resumes exactly.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from precision_shim.adapting import Call, seam
from precision_shim.errors import CheckpointLayoutError

from ...common.megatron_keys import OFFLOADED
from ..policy.requested import DISPATCH, SCALING

FEATURES = (DISPATCH, SCALING)
"""Features that need this file's seams to resume exactly; the seams act if at least one is on."""

GROUP = "megatron offloaded states"

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
_seam = partial(
    seam,
    feature=FEATURES,
    group=GROUP,
    delete_when="Megatron resumes a precision-aware HybridDeviceOptimizer exactly",
    optional=True,
)


def _offloads(inner: Any) -> bool:
    """Whether an optimizer is a HybridDeviceOptimizer, tested without importing its module."""
    return hasattr(inner, "param_to_inner_param")


def _counts(groups: list[dict[str, Any]]) -> set[int]:
    return {int(group["step"]) for group in groups if "step" in group}


@_seam(
    f"{_HYBRID}._sync_hdo_param_groups_to_sub_optimizers",
    why="each step copies the groups with the loaded step count over FusedAdam's own",
    relies_on=(
        "param_groups",
        "param_to_inner_param",
        "gpu_optimizer",
        "_sync_hdo_state_to_sub_optimizers",
        "_sync_sub_optimizers_state_to_hdo",
        "master_param",
        "offload_fraction",
        "dummy_step",
    ),
)
def hand_count_over(call: Call) -> Any:
    """Pass a loaded step count to the inner optimizers only once; they count later steps."""
    result = call.proceed()
    for group in call.instance.param_groups:
        group.pop("step", None)
    return result


@_seam(
    f"{_OPTIMIZER}.state_dict",
    why="the step count that is saved is that of the host's part, which there may not be",
    relies_on=(
        "HybridDeviceOptimizer",
        "sub_optimizers",
        "param_groups",
        "step",
        "optimizer",
        "config",
        "use_precision_aware_optimizer_no_fp8_or_ds_fp8",
    ),
)
def save_count(call: Call) -> Any:
    """Save the step count of FusedAdam's groups if no state is on the host.

    If an optimizer is not precision-aware, the shim saves no step count, because Megatron's load of
    the step count would end with a KeyError. SkyRL's patches act only if no step count was saved.
    """
    result = call.proceed()
    inner, config = call.instance.optimizer, call.instance.config
    if not _offloads(inner) or not config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return result
    groups = result["optimizer"]["param_groups"]
    counts: set[int] = set()
    # FusedAdam has no step count if every step so far was skipped.
    if inner.gpu_optimizer is not None:
        counts = _counts(inner.gpu_optimizer.param_groups) or {0}
    if len(counts) == 1 and not _counts(groups):
        for group in groups:
            group["step"] = next(iter(counts))
    return result


@_seam(
    f"{_OPTIMIZER}.load_state_dict",
    why="every sharding type has put a checkpoint's states into the outer optimizer here",
    relies_on=("HybridDeviceOptimizer", "dummy_step", "param_state", "step", "optimizer"),
)
def load_what_is_stepped(call: Call, state_dict: Any) -> Any:
    """Copy the loaded step count and master weights to the inner optimizers.

    Raises:
        CheckpointLayoutError: a checkpoint of an optimizer for CPU offload has no step count.
    """
    if "param_state" not in state_dict:
        return call.proceed()
    groups = state_dict["optimizer"]["param_groups"]
    counts = _counts(groups)
    if not counts and any(OFFLOADED in group for group in groups):
        raise CheckpointLayoutError(
            "Megatron optimizer checkpoint: it has no step count, and the optimizer would count "
            "from 1 again, with moments of more steps. Megatron saves none with "
            "optimizer_cpu_offload where nothing is on the host (optimizer_offload_fraction=0, its "
            "default); the shim does, for a precision-aware optimizer. Start from the model's "
            "weights without the optimizer's states, or set "
            "PRECISION_SHIM_FEATURES=-bf16-dispatch,-fp16-scaling to go on with that count."
        )
    result = call.proceed()
    inner = call.instance.optimizer
    if not _offloads(inner):
        return result
    # The saved optimizer had no CPU offload: if it has no step count, it had not stepped.
    count = float(next(iter(counts), 0))
    for state in inner.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = torch.tensor(count)
    with torch.no_grad():
        inner._sync_hdo_state_to_sub_optimizers()
        # Make the states refer to the inner optimizers' master weights, as each step does.
        inner._sync_sub_optimizers_state_to_hdo()
    # FusedAdam counts in its groups: a count in its states would stay the checkpoint's.
    for state in inner.gpu_optimizer.state.values() if inner.gpu_optimizer is not None else ():
        state.pop("step", None)
    return result
