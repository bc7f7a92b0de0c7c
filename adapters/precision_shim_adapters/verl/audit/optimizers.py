"""Audit verl's optimizer on FSDP after verl has built model and optimizer.

For verl 0.7.1's legacy workers, this module also reports which share of updates rounding loses.
"""

from __future__ import annotations

from typing import Any

import torch

from precision_shim.adapting import Call, seam
from precision_shim.auditing import meters
from precision_shim.auditing.automatic import watch
from precision_shim.precision.dtypes import parse_dtype

from ..training import fsdp
from ..training.engines import AUTOMODEL, GROUPS, SINCE, TITAN, VEOMNI, in_fp32
from .sent_weights import FEATURE, LEGACY

_BUILDS = {VEOMNI: "_build_model_optimizer", AUTOMODEL: "initialize", TITAN: "initialize"}
_WHY = "model, optimizer and scaler stand together for the first time"


@seam(
    feature=FEATURE,
    at=[
        {"target": f"{fsdp.SHARDED}._build_model_optimizer", "group": fsdp.ENGINE},
        *(
            {"target": f"{engine}.{method}", "group": GROUPS[engine], "only_if": SINCE[engine]}
            for engine, method in _BUILDS.items()
        ),
    ],
    why=_WHY,
    delete_when="verl says which precision its optimizers have",
    relies_on=("optimizer", "module", "model_config"),
    optional=True,
)
@seam(
    feature=FEATURE,
    at=[
        {"target": f"{owner}.__init__", "relies_on": (f"{subject}_optimizer", f"{subject}_module")}
        for owner, subject in ((fsdp.CRITIC, "critic"), (fsdp.ACTOR, "actor"))
    ],
    group=fsdp.LEGACY,
    why=_WHY,
    **LEGACY,
)
def audit(call: Call) -> Any:
    """Audit the optimizer of an engine or of a legacy worker; torchtitan's has an audit already."""
    result = call.proceed()
    owner, optimizer = call.instance, fsdp.optimizer_of(call.instance)
    if optimizer is None:  # a reference model has no optimizer
        return result
    parts, subject = fsdp.inside(optimizer), fsdp.subject_of(owner)
    config = getattr(owner, "engine_config", None)
    strategy = fsdp.read_key(config, "strategy")
    section = strategy if strategy in ("veomni", "torchtitan") else "fsdp_config"
    mend = in_fp32(strategy, section)
    if parse_dtype(str(fsdp.read_key(config, "model_dtype"))) is torch.float32:
        mend = "ep_size=1"  # see ``automodel.tell_rounded_weights``
    watch(
        "verl",
        subject,
        optimizer,
        inner=parts[-1] if parts else None,
        model=getattr(owner, "module" if hasattr(owner, "module") else f"{subject}_module"),
        scaler=(owner, lambda owner: getattr(owner, "scaler", None)),
        mend=mend,
        wrote=fsdp.written(
            fsdp.config_of(owner),
            strategy or "fsdp",
            section,
            reads_dtype=hasattr(owner, "actor_optimizer"),
        ),
    )
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
    **LEGACY,
)
def legacy_lost_updates(call: Call) -> Any:
    """Add to a legacy worker's metrics the shares of updates that rounding loses (verl 0.7.1)."""
    result = call.proceed()
    prefix = f"{fsdp.subject_of(call.instance)}/"
    result.update(meters.metrics(fsdp.optimizer_of(call.instance), prefix))
    return result
