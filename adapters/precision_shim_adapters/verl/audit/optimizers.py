"""Audit verl's optimizer on FSDP after verl has built model and optimizer.

For verl 0.7.1's legacy workers, this module also reports which share of updates rounding loses.
"""

from __future__ import annotations

import functools
from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.auditing import meters
from precision_shim.auditing.automatic import watch

from ..rollout.dtypes import rollout_dtype
from ..training import fsdp
from ..training.engines import AUTOMODEL, GROUPS, SINCE, VEOMNI, inside
from .sent_weights import know_legacy_rollout

FEATURE = "audit"
_WHY = "model, optimizer and scaler stand together for the first time"
_LEGACY: dict[str, Any] = {"delete_when": "verl 0.8 is the oldest in use", "optional": True}


@seam(
    feature=FEATURE,
    at=[
        {"target": f"{fsdp.SHARDED}._build_model_optimizer", "group": fsdp.ENGINE},
        *(
            {"target": f"{engine}.{method}", "group": GROUPS[engine], "only_if": SINCE[engine]}
            for engine, method in ((VEOMNI, "_build_model_optimizer"), (AUTOMODEL, "initialize"))
        ),
    ],
    why=_WHY,
    delete_when="verl says which precision its optimizers have",
    relies_on=("optimizer", "module", "model_config"),
    optional=True,
)
def engine(call: Call) -> Any:
    """Audit the optimizer of an engine that no other adapter audits."""
    result = call.proceed()
    engine, optimizer = call.instance, call.instance.optimizer
    if optimizer is not None:
        parts = inside(optimizer)
        if parts and not hasattr(optimizer, "optimizers"):
            optimizer.optimizers = list(parts)  # the audit reads ``optimizers`` of a container
        _watch(engine, optimizer, engine.module, parts[-1] if parts else None)
    return result


def _watch(owner: Any, optimizer: Any, model: Any, inner: Any = None) -> None:
    scaler = functools.partial(getattr, owner, "scaler", None)
    subject = fsdp.subject_of(owner)
    watch("verl", subject, optimizer, inner=inner, model=model, scaler=scaler)


@seam(
    feature=FEATURE,
    at=[
        {
            "target": f"{fsdp.CRITIC}.__init__",
            "relies_on": ("critic_optimizer", "critic_module"),
        },
        {
            "target": f"{fsdp.ACTOR}.__init__",
            "relies_on": ("actor_optimizer", "actor_module"),
        },
    ],
    group=fsdp.LEGACY,
    why=_WHY,
    **_LEGACY,
)
def legacy(call: Call) -> Any:
    """Audit the optimizer of verl 0.7.1's actor or critic."""
    result = call.proceed()
    worker, optimizer = call.instance, fsdp.optimizer_of(call.instance)
    if optimizer is not None:  # a reference policy has no optimizer
        _watch(worker, optimizer, getattr(worker, f"{fsdp.subject_of(worker)}_module"))
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
            (f"{fsdp.CRITIC}.update_critic", "critic"),
            (f"{fsdp.ACTOR}.update_policy", "actor"),
        )
    ],
    group="legacy metrics",
    why="its dict of metrics",
    **_LEGACY,
)
def legacy_lost_updates(call: Call) -> Any:
    """Add to a legacy worker's metrics the shares of updates that rounding loses (verl 0.7.1)."""
    result = call.proceed()
    worker = call.instance
    result.update(meters.metrics(fsdp.optimizer_of(worker), f"{fsdp.subject_of(worker)}/"))
    return result
