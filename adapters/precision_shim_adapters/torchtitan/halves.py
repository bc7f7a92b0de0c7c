"""torchtitan: audit the weights that go to the generators, and ask the generators what they hold.

The trainer puts one state dict into TorchStore, after it has cast it. A generator is a Monarch
actor with vLLM's ``LLMEngine``; each of its ranks has the engine of its own shard.
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
"""The key under which torchtitan's trainer puts its weights."""


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
    """Observe the weights that go into the store."""
    if key == _KEY and isinstance(state_dict, Mapping):
        items: Any = state_dict.items()
        seen = sending.observe(items, FRAMEWORK, "policy")
        if seen is not items:
            deque(seen, maxlen=0)
    return await call.proceed()


# -- what a generator holds ----------------------------------------------------------------------


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
    """Ask the engine of a new generator what it holds."""
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
    """Ask a generator's engine again after some of the weight syncs."""
    await call.proceed()
    _ask(call.instance, count_sync(call.instance))


def _ask(generator: Any, sync: int = 0) -> None:
    if sending.is_wanted():
        audit(generator._engine, _whose(generator), sync)


def _whose(generator: Any) -> Whose:
    from monarch.actor import context

    actor = context().actor_instance.name  # generator_0, ... where there are several
    return Whose(FRAMEWORK, SUBJECT, f"{actor}, rank {generator._rank}")
