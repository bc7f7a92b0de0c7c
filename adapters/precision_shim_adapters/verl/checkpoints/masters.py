"""Reload Megatron's master weights after verl has loaded only a checkpoint's weights."""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, seam

from ...megatron.training import masters

_MANAGER = "verl.utils.checkpoint.megatron_checkpoint_manager:MegatronCheckpointManager"


@seam(
    f"{_MANAGER}.load_checkpoint",
    masters.FEATURES,
    group=masters.GROUP,
    why="checkpoint.load_contents without 'optimizer' leaves the masters of the former weights",
    upstream=masters.UPSTREAM,
    delete_when="verl calls reload_model_params after it",
    relies_on=("should_load_optimizer", "should_load_model", "optimizer"),
    optional=True,
)
def load_checkpoint(call: Call) -> Any:
    """Load a checkpoint; reload the master weights if verl loaded only the weights."""
    result = call.proceed()
    manager = call.instance
    # In 0.9 and later, 'hf_model' in ``checkpoint.load_contents`` loads the weights as well.
    loads = manager.should_load_model or getattr(manager, "should_load_hf_model", False)
    if loads and not manager.should_load_optimizer and manager.optimizer is not None:
        subject = str(getattr(manager, "role", None) or "actor")
        masters.reload_masters("verl", subject, manager.optimizer)
    return result
