"""Audit the weights that verl's actor sends, and the engines of verl's rollout servers.

An actor's engine returns its weights as a generator that has not started, for verl's own weight
sync and for a checkpoint engine. The legacy workers of 0.7.1 make the generator of weights inside a
method, and pass it to the rollout's ``ServerAdapter``. The seams of this module run after the seams
of ``sync``, and so read the weights that the shim sends.

A rollout server is verl's own Ray actor around vLLM's ``AsyncLLM``, or around SGLang's
``TokenizerManager`` and HTTP server.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from precision_shim.adapting import Call, seam
from precision_shim.auditing import sending
from precision_shim.auditing.halves import ROLLOUT
from precision_shim.errors import DtypeError

from ..ray_actors import name_of_actor
from ..rollout.held import Whose, audit_async, count_sync
from ..rollout.held_sglang import audit_manager
from . import sides, sync

FEATURE, SENT, HELD, HELD_SGLANG = "audit", "weights audit", "vllm servers", "sglang servers"
_ENGINES = "verl.workers.engine.{}.transformer_impl:{}.get_per_tensor_param"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"
_SGLANG = "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangHttpServer"
_IF_SGLANG = f"{_SGLANG}.set_global_steps"
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
        name, key = sides.asked_dtype(rollout, sides.ROLLOUT)
    except DtypeError:  # ``rollout-agreement`` has reported this dtype
        return
    backend = str(rollout.get("name"))
    reason = "" if backend in ("vllm", "sglang") else f"verl's servers of {backend} are not asked"
    sending.tell_asked("verl", name, key, reason)


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
    if sending.is_wanted() and "actor" in worker.role:
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
    optional=True,
)
def look_at_stream(call: Call) -> Any:
    """Return an engine's weights in a generator that also passes each weight to the audit."""
    stream, *rest = result = call.proceed()
    engine = call.instance
    if engine not in _senders:
        return result
    then = _rounds_to(_senders[engine])
    seen = sending.observe(stream, "verl", "actor", model=engine.module, then=then)
    return result if seen is stream else (seen, *rest)


def _rounds_to(sender: Any) -> torch.dtype | None:
    """The dtype to which a checkpoint engine rounds the weights before sending them."""
    dtype = getattr(sender, "rollout_dtype", None)
    if dtype is None or not (sync.casts(sender) or sync.is_delta(sender)):
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
        seen = sending.observe(weights, "verl", "actor")
        if seen is not weights:
            call.arguments["weights"] = seen
    return await call.proceed()


def know_legacy_rollout(worker: Any) -> None:
    """Store the rollout dtype of a legacy worker of verl 0.7.1, for the audit.

    Args:
        worker: an ``ActorRolloutRefWorker`` with an actor and a rollout.
    """
    if sending.is_wanted():
        tell_asked(worker.config.rollout)
        _legacy[:] = [type(worker).__module__]


@seam(
    f"{_SERVER}.run_server",
    FEATURE,
    group=HELD,
    only_if=(f"{_SERVER}.run_server",),  # before verl 0.7 a base class has run_server
    why="has made vLLM's engine when it ends",
    delete_when=_DELETE,
    relies_on=("engine", "AsyncLLM"),
    optional=True,
)
async def ask_new_server(call: Call) -> Any:
    """Audit the engine of a new vLLM server."""
    result = await call.proceed()
    await _ask(call.instance)
    return result


@seam(
    f"{_SERVER}.collective_rpc",
    FEATURE,
    group=HELD,
    only_if=(f"{_SERVER}.run_server",),  # before verl 0.7 a base class has run_server
    why="each weight sync begins with this call, which returns when the engine has the weights",
    delete_when=_DELETE,
    relies_on=("engine", "method"),
    optional=True,
)
async def ask_after_sync(call: Call, method: Any) -> Any:
    """Audit the engine of a vLLM server again after some of the weight syncs."""
    result = await call.proceed()
    if method == "update_weights_from_ipc":
        await _ask(call.instance, count_sync(call.instance))
    return result


async def _ask(server: Any, sync: int = 0) -> None:
    engine = getattr(server, "engine", None)  # only a server's first node has an engine
    if engine is not None and sending.is_wanted():
        await audit_async(engine, _whose(), sync)


@seam(
    f"{_SGLANG}.launch_server",
    FEATURE,
    group=HELD_SGLANG,
    only_if=(_IF_SGLANG,),  # before 0.7 verl calls no server when a weight sync ends
    why="has made SGLang's processes when it ends",
    delete_when=_DELETE,
    relies_on=("node_rank", "tokenizer_manager"),
    optional=True,
)
async def ask_new_sglang_server(call: Call) -> Any:
    """Audit the engine of a new SGLang server."""
    result = await call.proceed()
    await _ask_sglang(call.instance)
    return result


@seam(
    _IF_SGLANG,
    FEATURE,
    group=HELD_SGLANG,
    only_if=(_IF_SGLANG,),
    why="each weight sync ends with this call, which the trainer waits for",
    delete_when=_DELETE,
    relies_on=("global_steps",),
    optional=True,
)
async def ask_sglang_after_sync(call: Call) -> Any:
    """Audit the engine of an SGLang server again after some of the weight syncs."""
    result = await call.proceed()
    await _ask_sglang(call.instance, count_sync(call.instance))
    return result


async def _ask_sglang(server: Any, sync: int = 0) -> None:
    if server.node_rank == 0 and sending.is_wanted():  # only node 0 has a tokenizer manager
        await audit_manager(server.tokenizer_manager, _whose(), sync)


def _whose() -> Whose:
    """Name this process's engine by its Ray actor, whose name is the same in each run."""
    name = name_of_actor() or "server"
    others = {"reward": "reward model", "teacher": "teacher"}
    subject = next((long for short, long in others.items() if f"_{short}_" in name), ROLLOUT)
    return Whose("verl", subject, name)
