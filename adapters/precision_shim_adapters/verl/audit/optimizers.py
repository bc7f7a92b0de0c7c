"""Audit verl's optimizer on FSDP after verl has built model and optimizer.

For verl 0.7.1's legacy workers, this module also reports which share of updates rounding loses.
"""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.auditing import meters
from precision_shim.auditing.automatic import watch

from ..rollout.dtypes import rollout_dtype
from .sent_weights import know_legacy_rollout

FEATURE = "audit"
_WHY = "model, optimizer and scaler stand together for the first time"
_DELETE = "verl says which precision its optimizers have"
_LEGACY: dict[str, Any] = {"delete_when": "verl 0.8 is the oldest in use", "optional": True}


@seam(
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_model_optimizer",
    FEATURE,
    group="fsdp engine",
    why=_WHY,
    delete_when=_DELETE,
    relies_on=("optimizer", "module", "model_config"),
    optional=True,
)
def engine(call: Call) -> Any:
    """Audit an engine's optimizer."""
    result = call.proceed()
    engine = call.instance
    if engine.optimizer is not None:
        kind = getattr(engine.model_config, "model_type", "")
        watch(
            "verl",
            "critic" if kind == "value_model" else "actor",
            engine.optimizer,
            model=engine.module,
            scaler=lambda: getattr(engine, "scaler", None),
        )
    return result


@seam(
    feature=FEATURE,
    at=[
        {
            "target": "verl.workers.critic.dp_critic:DataParallelPPOCritic.__init__",
            "relies_on": ("critic_optimizer", "critic_module"),
        },
        {
            "target": "verl.workers.actor.dp_actor:DataParallelPPOActor.__init__",
            "relies_on": ("actor_optimizer", "actor_module"),
        },
    ],
    group="legacy fsdp workers",
    why=_WHY,
    **_LEGACY,
)
def legacy(call: Call) -> Any:
    """Audit the optimizer of verl 0.7.1's actor or critic."""
    result = call.proceed()
    worker = call.instance
    subject = "actor" if hasattr(worker, "actor_module") else "critic"
    optimizer = getattr(worker, f"{subject}_optimizer")
    if optimizer is not None:  # a reference policy has no optimizer
        watch(
            "verl",
            subject,
            optimizer,
            model=getattr(worker, f"{subject}_module"),
            scaler=lambda: getattr(worker, "scaler", None),
        )
    return result


@seam(
    feature=FEATURE,
    at=[
        {
            "target": f"verl.workers.{kind}_workers:ActorRolloutRefWorker.init_model",
            "relies_on": ("_is_actor", "_is_rollout", "actor_optimizer", "config"),
        }
        for kind in ("fsdp", "megatron")
    ],
    group="legacy metrics",
    why="the worker knows both the optimizer and the rollout's dtype",
    **_LEGACY,
)
def legacy_rollout(call: Call) -> Any:
    """Record the dtype of verl 0.7.1's rollout, for the lost-update meter and for the audit."""
    result = call.proceed()
    worker = call.instance
    if worker._is_actor and worker._is_rollout:
        know_legacy_rollout(worker)
        meters.tell_rollout(worker.actor_optimizer, rollout_dtype(worker.config))
    return result


@seam(
    feature=FEATURE,
    at=[
        {"target": target, "relies_on": (f"{subject}_optimizer",)}
        for target, subject in (
            ("verl.workers.critic.megatron_critic:MegatronPPOCritic.update_critic", "critic"),
            ("verl.workers.actor.megatron_actor:MegatronPPOActor.update_policy", "actor"),
            ("verl.workers.critic.dp_critic:DataParallelPPOCritic.update_critic", "critic"),
            ("verl.workers.actor.dp_actor:DataParallelPPOActor.update_policy", "actor"),
        )
    ],
    group="legacy metrics",
    why="its dict of metrics",
    **_LEGACY,
)
def legacy_lost_updates(call: Call) -> Any:
    """Add to a legacy worker's metrics the shares of updates that rounding loses (verl 0.7.1)."""
    result = call.proceed()
    kind = "actor" if hasattr(call.instance, "actor_optimizer") else "critic"
    result.update(meters.metrics(getattr(call.instance, f"{kind}_optimizer"), f"{kind}/"))
    return result
