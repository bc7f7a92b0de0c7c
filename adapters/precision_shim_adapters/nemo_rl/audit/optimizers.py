"""NeMo-RL: audit DTensor workers' optimizers, and report all workers' updates lost to rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precision_shim.adapting import Call, in_force, seam
from precision_shim.adapting.audit import meters, tell_asked, watch

from ...common.ray_actors import put_in_front
from ...torch_fp16 import ScaledTraining
from ..config import FRAMEWORK, asked_of, written
from ..training.dtensor import add_figures, outermost
from ..training.workers import DTENSOR, INHERITED, MEGATRON, VALUE_V2, exported, group_at, mixin

FEATURE = "audit"
_DELETE = "NeMo-RL says which precision its optimizers have"
_RELIES_ON = ("__init__", "optimizer", "model")


def see(worker: Any) -> None:
    """Audit a worker's optimizer, if the worker has one."""
    optimizer = getattr(worker, "optimizer", None)
    group = group_at(worker)
    if optimizer is not None and in_force(FRAMEWORK, FEATURE, group):
        subject = "value" if group == VALUE_V2 else "policy"
        watch(
            FRAMEWORK,
            subject,
            optimizer,
            model=worker.model,
            scaler=(worker, ScaledTraining.scaler_of),
            fp32_key=f"{subject}.hf_config_overrides.dtype=float32",
            wrote=written(worker.cfg, subject),
        )
        _tell_audit(worker)


def _tell_audit(worker: Any) -> None:
    """Report the dtype of the rollout, if the worker has one."""
    config = getattr(worker, "cfg", None)
    if group_at(worker) == VALUE_V2 or not isinstance(config, Mapping):
        return
    asked = asked_of(config)
    if asked is not None:
        tell_asked(FRAMEWORK, *asked)


@exported(
    (each.actor_class(each.beneath, *_RELIES_ON) for each in DTENSOR),
    feature=FEATURE,
    delete_when=_DELETE,
)
def redecorate(actor_class: Any) -> Any:
    """Make the actor class again with ``AuditedWorker`` as the worker's first base class."""
    return put_in_front(AuditedWorker, actor_class)


@seam(
    feature=FEATURE,
    at=[each.at(f"{each.beneath}.__init__", each.beneath) for each in DTENSOR],
    why=INHERITED,
    delete_when=_DELETE,
    relies_on=("optimizer", "model"),
)
def look_at(call: Call) -> Any:
    """Audit a new worker once, although its class and ``AuditedWorker`` may both call this."""
    with outermost(call.instance, "audit") as outer:
        result = call.proceed()
    if outer:
        see(call.instance)
    return result


@seam(
    feature=FEATURE,
    at=[each.method("train", group=each.metrics) for each in (*DTENSOR, *MEGATRON)],
    why=INHERITED,
    delete_when="NeMo-RL says which of its updates are lost to rounding",
    relies_on=("train", "optimizer", "all_mb_metrics", "eval_mode"),
)
def report_lost_updates(call: Call, eval_mode: Any = False) -> Any:
    """Add the fractions of weight updates that are lost to rounding to the metrics of ``train``."""
    _tell_audit(call.instance)
    result = call.proceed()
    if not eval_mode:
        add_figures(result, meters.metrics(getattr(call.instance, "optimizer", None)))
    return result


AuditedWorker = mixin(__name__, "AuditedWorker", __init__=[look_at], train=[report_lost_updates])
"""A mixin that audits a DTensor worker."""
