"""torchtitan: audit the weights sent to the generators.

torchtitan's RL trainer casts its state dict and then puts it into TorchStore.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.adapting.audit import weight_audit

from ..training.trainers import FRAMEWORK

_KEY = "model_state_dict"
"""The key under which torchtitan's trainer stores weights for the rollout engines."""


@seam(
    "torchstore.api:put_state_dict",
    "audit",
    group="weights audit",
    aliases=("torchstore:put_state_dict",),
    why="gets the weights as they are sent",
    delete_when="torchtitan says which precision its generators have",
    optional=True,
)
async def look_at_state_dict(call: Call, state_dict: Any, key: Any) -> Any:
    """Pass to the audit the weights that the trainer puts into TorchStore."""
    if key == _KEY and isinstance(state_dict, Mapping):
        items: Any = state_dict.items()
        seen = weight_audit.observe(items, FRAMEWORK, "policy")
        if seen is not items:
            deque(seen, maxlen=0)
    return await call.proceed()
