"""Audit the weights that verl's actor sends to the rollout.

An actor's engine returns its weights as a generator that has not started. The legacy workers of
0.7.1 pass the generator to the rollout's ``ServerAdapter``. The seams of this module run after the
seams of ``weight_sync``, and so read the weights that the shim sends.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch

from precision_shim.adapting import Call, at_uninstall, seam
from precision_shim.adapting.audit import weight_audit
from precision_shim.errors import DtypeError

from ..config import AUTOMODEL, MEGATRON, ROLLOUT, SHARDED, TITAN, VEOMNI
from ..rollout import dtypes, weight_sync

FEATURE, SENT = "audit", "weights audit"
LEGACY: dict[str, Any] = {"delete_when": "verl 0.8 is the oldest in use", "optional": True}
"""Arguments that all seams on verl 0.7.1's workers share."""

_DELETE = "verl says which precision its rollouts have"

_senders: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Maps an actor's engine to the checkpoint engine that sends its weights, if there is one."""

_legacy: list[str] = []
"""The module of this process's legacy worker, if the worker trains an actor; otherwise empty."""


def _tell_asked(worker: Any) -> None:
    """Record the configured dtype of a worker's rollout, for the audit."""
    with suppress(DtypeError):  # ``rollout-agreement`` has reported a wrong dtype
        asked = dtypes.asked_dtype(worker.config.rollout, ROLLOUT)
        weight_audit.tell_asked("verl", *asked)


@seam(
    "verl.workers.engine_workers:ActorRolloutRefWorker.init_model",
    FEATURE,
    group=SENT,
    why="the worker knows the engine, the rollout's dtype and the checkpoint engine",
    delete_when=_DELETE,
    relies_on=("actor", "role", "rollout", "config"),
    optional=True,
)
def know_rollout(call: Call) -> Any:
    """Store the rollout's dtype and the checkpoint engine for the audit of the sent weights."""
    result = call.proceed()
    worker = call.instance
    if weight_audit.is_wanted() and "actor" in worker.role:
        _tell_asked(worker)
        _senders[worker.actor.engine] = getattr(worker, "checkpoint_engine", None)
    return result


@seam(
    feature=FEATURE,
    at=[
        f"{engine}.get_per_tensor_param" for engine in (SHARDED, MEGATRON, VEOMNI, AUTOMODEL, TITAN)
    ],
    group=SENT,
    why="returns the weights that are sent, unstarted",
    delete_when=_DELETE,
    relies_on=("module",),
    optional=True,
)
def look_at_stream(call: Call) -> Any:
    """Return an engine's weights in a generator that also passes each weight to the audit."""
    stream, *rest = result = call.proceed()
    engine = call.instance
    if engine not in _senders:
        return result
    then = _rounds_to(_senders[engine])
    seen = weight_audit.observe(stream, "verl", "actor", model=engine.module, then=then)
    return result if seen is stream else (seen, *rest)


def _rounds_to(sender: Any) -> torch.dtype | None:
    """The dtype to which a checkpoint engine rounds the weights before sending them."""
    dtype = getattr(sender, "rollout_dtype", None)
    if isinstance(dtype, torch.dtype) and weight_sync.rounds_weights(sender):
        return dtype
    return None


@seam(
    feature=FEATURE,
    at=[
        f"verl.workers.rollout.{engine}_rollout.{engine}_rollout:ServerAdapter.update_weights"
        for engine in ("vllm", "sglang")
    ],
    only_if=("verl.workers.fsdp_workers",),
    group=f"legacy {SENT}",
    why="gets the weights of the legacy workers, unstarted",
    relies_on=("weights",),
    **LEGACY,
)
async def look_at_legacy_stream(call: Call, weights: Any) -> Any:
    """Wrap a legacy worker's weights in a generator that also passes each weight to the audit."""
    if _legacy:
        seen = weight_audit.observe(weights, "verl", "actor")
        if seen is not weights:
            call.arguments["weights"] = seen
    return await call.proceed()


@seam(
    feature=FEATURE,
    at=[
        f"verl.workers.{kind}_workers:ActorRolloutRefWorker.init_model"
        for kind in ("fsdp", "megatron")
    ],
    group="legacy metrics",
    why="the worker knows both the optimizer and the rollout's dtype",
    relies_on=("_is_actor", "_is_rollout", "actor_optimizer", "config"),
    **LEGACY,
)
def know_legacy_rollout(call: Call) -> Any:
    """Record the dtype of verl 0.7.1's rollout, for the audit."""
    result = call.proceed()
    worker = call.instance
    if worker._is_actor and worker._is_rollout and weight_audit.is_wanted():
        _tell_asked(worker)
        _legacy[:] = [type(worker).__module__]
        at_uninstall(_legacy.clear)
    return result
