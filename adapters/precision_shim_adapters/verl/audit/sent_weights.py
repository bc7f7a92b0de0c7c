"""Audit the weights that verl's actor sends to the rollout.

An actor's engine returns its weights as a generator that has not started, for verl's own weight
sync and for a checkpoint engine. The legacy workers of 0.7.1 make the generator of weights inside a
method, and pass it to the rollout's ``ServerAdapter``. The seams of this module run after the seams
of ``sync``, and so read the weights that the shim sends.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from precision_shim.adapting import Call, seam
from precision_shim.auditing import weight_audit
from precision_shim.errors import DtypeError

from ..rollout import dtypes, weight_sync

FEATURE, SENT = "audit", "weights audit"
_ENGINES = "verl.workers.engine.{}.transformer_impl:{}.get_per_tensor_param"
_DELETE = "verl says which precision its rollouts have"
_ADAPTER = "ServerAdapter.update_weights"

_senders: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Maps an actor's engine to the checkpoint engine that sends its weights, if there is one."""

_legacy: list[str] = []
"""The module of this process's legacy worker, if the worker trains an actor; otherwise empty."""


def tell_asked(rollout: Any) -> None:
    """Record the configured dtype of a worker's rollout, for the audit.

    Args:
        rollout: the section ``actor_rollout_ref.rollout`` of the worker's config.
    """
    try:
        name, key = dtypes.asked_dtype(rollout, dtypes.ROLLOUT)
    except DtypeError:  # ``rollout-agreement`` has reported this dtype
        return
    weight_audit.tell_asked("verl", name, key)


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
        tell_asked(worker.config.rollout)
        _senders[worker.actor.engine] = getattr(worker, "checkpoint_engine", None)
    return result


@seam(
    feature=FEATURE,
    at=[
        {"target": _ENGINES.format(package, name)}
        for package, name in (
            ("fsdp", "FSDPEngine"),
            ("megatron", "MegatronEngine"),
            ("veomni", "VeOmniEngine"),
            ("automodel", "AutomodelEngine"),
            ("torchtitan", "TorchTitanEngine"),
        )
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
    if dtype is None or not weight_sync.rounds_weights(sender):
        return None
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    return found if isinstance(found, torch.dtype) else None


@seam(
    feature=FEATURE,
    at=[
        f"verl.workers.rollout.{engine}_rollout.{engine}_rollout:{_ADAPTER}"
        for engine in ("vllm", "sglang")
    ],
    only_if=("verl.workers.fsdp_workers",),
    group=f"legacy {SENT}",
    why="gets the weights of the legacy workers, unstarted",
    delete_when="verl 0.8 is the oldest in use",
    relies_on=("weights",),
    optional=True,
)
async def look_at_legacy_stream(call: Call, weights: Any) -> Any:
    """Wrap a legacy worker's weights in a generator that also passes each weight to the audit."""
    if _legacy:
        seen = weight_audit.observe(weights, "verl", "actor")
        if seen is not weights:
            call.arguments["weights"] = seen
    return await call.proceed()


def know_legacy_rollout(worker: Any) -> None:
    """Store the rollout dtype of a legacy worker of verl 0.7.1, for the audit.

    Args:
        worker: an ``ActorRolloutRefWorker`` with an actor and a rollout.
    """
    if weight_audit.is_wanted():
        tell_asked(worker.config.rollout)
        _legacy[:] = [type(worker).__module__]
