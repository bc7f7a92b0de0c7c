"""Seams of the adapter ``megatron`` for models built outside every ``with building(...)`` block.

Every path to Megatron's optimizers calls ``_get_megatron_optimizer_based_on_param_groups``. Delete
this module when a model can train at Megatron's initial loss scale, the DDP's gradient check lets
steps be skipped, and OptimizerConfig refuses fields that are set after validation.
"""

from __future__ import annotations

import copy
from typing import Any

from precision_shim.adapting import Call, current_settings, seam, warn

from ..policy.optimizer_plan import scaler_row
from ..policy.requested import MOSTLY, ON_SCALING, SCALING
from .build import DIRECT, current_build, megatron_label
from .ddp import UNCHECKED
from .optimizer import check_again
from .overflow import SCALER, dynamic_scalers

_FIRST = float(scaler_row()["initial_loss_scale"])
_MAKE = "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups"


@seam(
    SCALER,
    why="no config is read here: only the values that Megatron passes on can be told apart",
    delete_when="Megatron's default is a scale at which a model can train",
    **ON_SCALING,
)
def start_lower(call: Call, initial_scale: float, min_scale: float, growth_interval: float) -> Any:
    """Lower Megatron's initial loss scale, 2**32, at which the first 25 steps would be skipped.

    With Megatron's hysteresis of 2, the first overflow does not change the scale; each of the next
    24 halves it, down to 2**8.
    """
    if current_build() is not None:
        return call.proceed()
    from megatron.core.optimizer import OptimizerConfig

    settings = current_settings()
    if initial_scale == OptimizerConfig.initial_loss_scale:
        wanted = settings["loss_scale_init"] if settings.is_set("loss_scale_init") else _FIRST
        call.arguments["initial_scale"] = max(wanted, min_scale)
    if growth_interval == OptimizerConfig.loss_scale_window and settings.is_set("growth_interval"):
        call.arguments["growth_interval"] = settings["growth_interval"]
    return call.proceed()


@seam(
    _MAKE,
    "dtype-coercion",
    why="some trainers set fields on a finished config, and the inner optimizer is made here",
    delete_when="Megatron's OptimizerConfig refuses fields that are set later",
    **MOSTLY,
)
def check_config(call: Call, config: Any) -> Any:
    """Validate an OptimizerConfig again: coerce dtype names, and recompute derived fields."""
    if current_build() is None:
        check_again(config)
    return call.proceed()


@seam(
    _MAKE,
    why="has the scaler that was made and the DDPs in hand, before the first reduction",
    delete_when="Megatron's check asks whether the loss scale is dynamic",
    relies_on=("grad_scaler",),
    **ON_SCALING,
)
def let_overflows_pass(call: Call, config: Any, model_chunks: Any) -> Any:
    """Turn off the DDPs' NaN check of gradients if a dynamic loss scaler will skip overflows."""
    optimizer = call.proceed()
    if current_build() is not None:
        return optimizer
    if not dynamic_scalers(optimizer):
        if config.fp16 and config.loss_scale:
            DIRECT.decide(
                SCALING,
                f"the static loss scale {config.loss_scale:g} is left alone",
                "the config has loss_scale: no step is counted, nothing is prepared once",
            )
        return optimizer
    stopped = [_stop_checking(chunk) for chunk in model_chunks]
    if any(stopped):
        DIRECT.decide(SCALING, *UNCHECKED)
    return optimizer


def _stop_checking(chunk: Any) -> bool:
    kinds = ("bucket_groups", "expert_parallel_bucket_groups")
    groups = [group for kind in kinds for group in getattr(chunk, kind, ())]
    checking = [group for group in groups if group.ddp_config.check_for_nan_in_grad]
    for group in checking:  # copy the config object, which another model may share
        group.ddp_config = copy.copy(group.ddp_config)
        group.ddp_config.check_for_nan_in_grad = False
    if not groups and getattr(getattr(chunk, "ddp_config", None), "check_for_nan_in_grad", False):
        warn(
            f"{megatron_label()}: {type(chunk).__name__} checks gradients by itself: an fp16 "
            "overflow ends the job before the loss scaler can skip the step. Set "
            "check_for_nan_in_grad to False in its config."
        )
    return bool(checking)
