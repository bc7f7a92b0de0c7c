"""Audit verl's optimizer on FSDP after verl has built model and optimizer.

For verl 0.7.1's legacy workers, this module also reports which share of updates rounding loses.
"""

from __future__ import annotations

from typing import Any

import torch

from precision_shim.adapting import Call, seam
from precision_shim.adapting.audit import meters, watch
from precision_shim.adapting.dtypes import parse_dtype

from .. import config
from ..config import AUTOMODEL, SHARDED, TITAN, VEOMNI
from ..training.fsdp import inside, optimizer_of
from .sent_weights import FEATURE, LEGACY

_BUILDS = {
    SHARDED: "_build_model_optimizer",
    VEOMNI: "_build_model_optimizer",
    AUTOMODEL: "initialize",
    TITAN: "initialize",
}
_WHY = "model, optimizer and scaler stand together for the first time"


@seam(
    feature=FEATURE,
    at=[
        {"target": f"{engine}.{method}", "group": engine.group, "only_if": engine.since}
        for engine, method in _BUILDS.items()
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
        for owner, subject in ((config.CRITIC, "critic"), (config.ACTOR, "actor"))
    ],
    group=config.LEGACY,
    why=_WHY,
    **LEGACY,
)
def audit(call: Call) -> Any:
    """Audit the optimizer of an engine or of a legacy worker; torchtitan's has an audit already."""
    result = call.proceed()
    owner, optimizer = call.instance, optimizer_of(call.instance)
    if optimizer is None:  # a reference model has no optimizer
        return result
    parts, read = inside(optimizer), config.of_worker(owner)
    subject, fp32_key = read.subject, read.in_fp32
    if parse_dtype(str(read.get("model_dtype"))) is torch.float32:
        fp32_key = "ep_size=1"  # see ``automodel.tell_rounded_weights``
    watch(
        "verl",
        subject,
        optimizer,
        inner=parts[-1] if parts else None,
        model=getattr(owner, "module" if hasattr(owner, "module") else f"{subject}_module"),
        scaler=(owner, lambda owner: getattr(owner, "scaler", None)),
        fp32_key=fp32_key,
        wrote=read.written(),
    )
    return result


@seam(
    feature=FEATURE,
    at=[
        {"target": target, "relies_on": (f"{subject}_optimizer",)}
        for target, subject in (
            ("verl.workers.critic.megatron_critic:MegatronPPOCritic.update_critic", "critic"),
            ("verl.workers.actor.megatron_actor:MegatronPPOActor.update_policy", "actor"),
            (f"{config.CRITIC}.update_critic", "critic"),
            (f"{config.ACTOR}.update_policy", "actor"),
        )
    ],
    group="legacy metrics",
    why="its dict of metrics",
    **LEGACY,
)
def legacy_lost_updates(call: Call) -> Any:
    """Add to a legacy worker's metrics the shares of updates that rounding loses (verl 0.7.1)."""
    result = call.proceed()
    prefix = f"{config.subject_of(call.instance)}/"
    result.update(meters.metrics(optimizer_of(call.instance), prefix))
    return result
