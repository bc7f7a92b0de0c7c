"""torchtitan: audit the weights sent to the generators, and query the generators' engines.

torchtitan's RL trainer casts its state dict and then puts it into TorchStore. A generator is a
Monarch actor that runs vLLM's ``LLMEngine``; each rank has an engine with the rank's own shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.auditing import sending
from precision_shim.auditing.halves import ROLLOUT as SUBJECT

from ..rollout.held import Whose, audit, count_sync
from .places import FRAMEWORK, GENERATORS, HELD, SENT

_DELETE = "torchtitan says which precision its generators have"

_KEY = "model_state_dict"
"""The key under which torchtitan's trainer stores weights for the rollout engines."""


@seam(
    "torchstore.api:put_state_dict",
    "audit",
    group=SENT,
    aliases=("torchstore:put_state_dict",),
    why="gets the weights as they are sent",
    delete_when=_DELETE,
    optional=True,
)
async def look_at_state_dict(call: Call, state_dict: Any, key: Any) -> Any:
    """Pass to the audit the weights that the trainer puts into TorchStore."""
    if key == _KEY and isinstance(state_dict, Mapping):
        items: Any = state_dict.items()
        seen = sending.observe(items, FRAMEWORK, "policy")
        if seen is not items:
            deque(seen, maxlen=0)
    return await call.proceed()


@seam(
    f"{GENERATORS}.__init__",
    "audit",
    group=HELD,
    why="has made vLLM's engine when it ends",
    delete_when=_DELETE,
    relies_on=("_engine", "_rank"),
    optional=True,
)
def ask_new_generator(call: Call) -> None:
    """Query a new generator's engine for its dtypes."""
    call.proceed()
    _ask(call.instance)


@seam(
    f"{GENERATORS}._pull_model_state_dict",
    "audit",
    group=HELD,
    why="each weight sync ends here on each rank, between two steps of the engine",
    delete_when=_DELETE,
    relies_on=("_get_model", "policy_version"),
    optional=True,
)
async def ask_after_pull(call: Call) -> None:
    """Query a generator's engine again after some of the weight syncs."""
    await call.proceed()
    _ask(call.instance, count_sync(call.instance))


def _ask(generator: Any, sync: int = 0) -> None:
    if sending.is_wanted():
        audit(generator._engine, _whose(generator), sync)


def _whose(generator: Any) -> Whose:
    from monarch.actor import context

    actor = context().actor_instance.name  # such as generator_0
    return Whose(FRAMEWORK, SUBJECT, f"{actor}, rank {generator._rank}")
