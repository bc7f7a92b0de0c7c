"""verl on Megatron in fp16: a skipped step, and what becomes of it in verl's metrics.

verl raises ``NotImplementedError`` for every step that Megatron did not take; its engines from a
method of their own, 0.7.1's legacy workers inline. It breaks on a grad norm that is None: the SFT
trainer pops the missing key, and the trainers take the mean. So a skipped step is handed to it as a
step with grad norm NaN. Its learning rate schedulers and counters go on, as they do in verl's FSDP
engines.
"""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, seam

from ..megatron import SCALING, metrics, skipping
from .megatron import ENGINE


@seam(
    f"{ENGINE}.optimizer_step",
    SCALING,
    group="megatron",
    why="the engine's step, which raises for one that Megatron skipped",
    delete_when="verl takes a skipped step for one",
    relies_on=("optimizer", "NotImplementedError"),
    optional=True,
)
def step_engine(call: Call) -> Any:
    """Hand the engine a skipped step as one that succeeded, with grad norm NaN."""
    with skipping(succeeds=True):
        return call.proceed()


@seam(
    feature=SCALING,
    at=[
        {
            "target": "verl.workers.actor.megatron_actor:MegatronPPOActor.update_policy",
            "relies_on": ("actor_optimizer", "NotImplementedError"),
        },
        {
            "target": "verl.workers.critic.megatron_critic:MegatronPPOCritic.update_critic",
            "relies_on": ("critic_optimizer", "NotImplementedError"),
        },
    ],
    group="legacy workers",
    why="0.7.1 raises inline: only the optimizer's step inside can be answered for",
    delete_when="verl 0.8 is the oldest in use",
    optional=True,
)
def update(call: Call) -> Any:
    """Do the same for the mini-batches of 0.7.1's workers, and add their figures."""
    with skipping(succeeds=True):
        found = call.proceed()
    kind = "actor" if hasattr(call.instance, "actor_optimizer") else "critic"
    found.update(metrics(getattr(call.instance, f"{kind}_optimizer"), f"{kind}/"))
    return found
