"""verl on Megatron in fp16: a skipped step in verl's words, and the scaler's settings.

verl raises ``NotImplementedError`` for every step that Megatron did not take; its engines from a
method of their own, 0.7.1's legacy workers inline. It breaks on a grad norm that is None: the SFT
trainer pops the missing key, and the trainers take the mean. So a skipped step is handed to it as a
step with grad norm NaN. Its learning rate schedulers and counters go on, as they do in verl's FSDP
engines.
"""

from __future__ import annotations

from typing import Any

import torch

from precision_shim.adapting import Call, seam

from ..megatron import current_build
from ..megatron_overflow import FEATURE, metrics, scaler_settings, skipping, with_scaler_settings
from .megatron import _KEY, CONFIG, ENGINE, _read, _VerlBuild, _WithOverrides

# -- the step ----------------------------------------------------------------------------------


@seam(
    f"{ENGINE}.optimizer_step",
    FEATURE,
    group="megatron",
    why="the engine's step, which raises for one that Megatron skipped",
    delete_when="verl takes a skipped step for one",
    relies_on=("optimizer", "NotImplementedError"),
    optional=True,
)
def step_engine(call: Call) -> Any:
    """Hand the engine a skipped step as one that succeeded, with grad norm NaN."""
    subject = "critic" if getattr(call.instance, "is_value_model", False) else "actor"
    with skipping("verl", subject, succeeds=True):
        return call.proceed()


@seam(
    "verl.workers.actor.megatron_actor:MegatronPPOActor.update_policy",
    FEATURE,
    group="legacy workers",
    why="0.7.1 raises inline: only the optimizer's step inside can be answered for",
    delete_when="verl 0.8 is the oldest in use",
    relies_on=("actor_optimizer", "NotImplementedError"),
    optional=True,
)
def update_policy(call: Call) -> Any:
    """Do the same for the actor's mini-batches of 0.7.1's worker, and add its figures."""
    with skipping("verl", "actor", succeeds=True):
        found = call.proceed()
    found.update(metrics(call.instance.actor_optimizer, "actor/"))
    return found


@seam(
    "verl.workers.critic.megatron_critic:MegatronPPOCritic.update_critic",
    FEATURE,
    group="legacy workers",
    why="0.7.1 raises inline: only the optimizer's step inside can be answered for",
    delete_when="verl 0.8 is the oldest in use",
    relies_on=("critic_optimizer", "NotImplementedError"),
    optional=True,
)
def update_critic(call: Call) -> Any:
    """Do the same for the critic's mini-batches of 0.7.1's worker, and add its figures."""
    with skipping("verl", "critic", succeeds=True):
        found = call.proceed()
    found.update(metrics(call.instance.critic_optimizer, "critic/"))
    return found


# -- the scaler's settings ---------------------------------------------------------------------


# Over dispatch and coercion: this module is collected after theirs.
@seam(
    CONFIG,
    FEATURE,
    group="megatron",
    why="its override merge is the one way to fields that verl's fp16 branch sets",
    delete_when="verl's optimizer config has fields for the loss scaler",
    relies_on=("override_optimizer_config", "initial_loss_scale"),
)
def scale_from_settings(call: Call, optim_config: Any, fp16: Any) -> Any:
    """Bring the variables that the user set beneath ``override_optimizer_config``.

    Raises:
        SettingsError: the first scale is below the scaler's minimum.
    """
    build = current_build()
    model = build.seen.single if isinstance(build, _VerlBuild) else None
    in_fp16 = model is torch.float16 if model is not None else bool(fp16)
    if scaler_settings() and in_fp16:
        written = _read(optim_config, _KEY) or {}
        values = with_scaler_settings({str(key): written[key] for key in written}, _KEY)
        call.arguments["optim_config"] = _WithOverrides(optim_config, values)
    return call.proceed()
