"""torchtitan: audit the weights that the trainer sends to the generators.

The trainer puts one state dict into TorchStore, after it has cast it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.auditing import sending

from .places import FRAMEWORK, SENT

_KEY = "model_state_dict"
"""Under which torchtitan's trainer puts its weights."""


@seam(
    "torchstore.api:put_state_dict",
    "audit",
    group=SENT,
    aliases=("torchstore:put_state_dict",),
    why="gets the weights as they are sent",
    delete_when="torchtitan says which precision its generators have",
    optional=True,
)
async def look_at_state_dict(call: Call, state_dict: Any, key: Any) -> Any:
    """Look at the weights that go into the store."""
    if key == _KEY and isinstance(state_dict, Mapping):
        items: Any = state_dict.items()
        seen = sending.observe(items, FRAMEWORK, "policy")
        if seen is not items:
            deque(seen, maxlen=0)
    return await call.proceed()
