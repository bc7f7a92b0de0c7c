"""SkyRL on Megatron: reload master weights if SkyRL loads only a checkpoint's weights."""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, seam

from ..megatron.training import masters
from .training.megatron import TRAIN


@seam(
    f"{TRAIN}.distributed.megatron.megatron_strategy:MegatronStrategy.load_checkpoint",
    masters.FEATURES,
    group=masters.GROUP,
    why="load_optimizer_states=False leaves the masters of the former weights",
    upstream=masters.UPSTREAM,
    delete_when="https://github.com/NovaSky-AI/SkyRL/pull/2149 is in the oldest SkyRL in use",
    relies_on=("actor_module",),
    optional=True,
)
def load_checkpoint(
    call: Call, model: Any, optimizer: Any = None, load_optimizer_states: bool = True
) -> Any:
    """Load a checkpoint; reload the master weights if SkyRL loaded only the weights.

    SkyRL's workers pass ``optimizer`` only to load the optimizer's states. If ``optimizer`` is
    None, the shim reads the optimizer from the model's wrapper.
    """
    result = call.proceed()
    owner = optimizer or getattr(model, "actor_optimizer", None)
    if owner is not None and not (optimizer and load_optimizer_states):
        masters.reload_masters("skyrl", "policy", owner)
    return result
