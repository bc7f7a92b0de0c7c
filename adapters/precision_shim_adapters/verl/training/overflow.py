"""verl on Megatron in fp16: report a skipped step to verl as a step with grad norm NaN.

If Megatron skips a step, verl raises ``NotImplementedError``: engines in ``optimizer_step``, the
legacy workers in the update function itself. verl fails on a grad norm of None, too. Schedulers and
counters of verl count a skipped step, as on FSDP.
"""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, seam

from ...megatron import SCALING, metrics, skipping
from ..config import MEGATRON, subject_of
from .fsdp import optimizer_of


@seam(
    f"{MEGATRON}.optimizer_step",
    SCALING,
    group="megatron",
    why="the engine's step, which raises for one that Megatron skipped",
    delete_when="verl takes a skipped step for one",
    relies_on=("optimizer", "NotImplementedError"),
    optional=True,
)
def step_engine(call: Call) -> Any:
    """Report a skipped step to the engine as a successful step with grad norm NaN."""
    with skipping(succeeds=True):
        return call.proceed()


@seam(
    feature=SCALING,
    at=[
        {"target": target, "relies_on": (f"{subject}_optimizer", "NotImplementedError")}
        for target, subject in (
            ("verl.workers.actor.megatron_actor:MegatronPPOActor.update_policy", "actor"),
            ("verl.workers.critic.megatron_critic:MegatronPPOCritic.update_critic", "critic"),
        )
    ],
    group="legacy workers",
    why="0.7.1 raises inline: only the optimizer's step inside can be answered for",
    delete_when="verl 0.8 is the oldest in use",
    optional=True,
)
def update(call: Call) -> Any:
    """Report skipped steps as successful in 0.7.1's workers; add the loss scaler's metrics."""
    with skipping(succeeds=True):
        result = call.proceed()
    result.update(metrics(optimizer_of(call.instance), f"{subject_of(call.instance)}/"))
    return result
