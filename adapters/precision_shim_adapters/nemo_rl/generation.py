"""NeMo-RL: query the generation workers' vLLM engines for their dtypes, for the audit.

A generation worker is a Ray actor that runs vLLM's ``LLM`` or ``AsyncLLM``. The shim replaces a
worker's actor class by an actor class with a mixin. In NeMo-RL 0.7 and later, quantised workers
inherit from the class that ``ray.remote`` decorates, so the shim also patches that class's methods.
"""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, in_force, seam
from precision_shim.auditing.halves import ROLLOUT

from ..ray_actors import name_of_actor, put_in_front
from ..rollout.held import Whose, audit, audit_async, count_sync
from .dtensor import FRAMEWORK
from .places import ASYNC, EXPORTED, INHERITED, SYNC, Worker

FEATURE, GROUP = "audit", SYNC.group
_DELETE = "NeMo-RL says which precision its rollouts have"
_NEW = "post_init"
_SYNCS = ("update_weights_via_ipc_zmq", "update_weights_from_collective")


def _methods(worker: Worker, *names: str) -> list[dict[str, Any]]:
    """The arguments for ``seam`` to patch methods of ``worker.beneath``, if NeMo-RL exports it."""
    return [
        worker.at(f"{worker.beneath}.{name}", worker.beneath, relies_on=("llm",), optional=True)
        for name in names
    ]


def _actor_class(worker: Worker, suffix: str = "") -> tuple[dict[str, Any], ...]:
    names = (f"{name}{suffix}" for name in (_NEW, *_SYNCS))
    return worker.actor_class(worker.beneath, "llm", *names)


def _whose() -> Whose:
    return Whose(FRAMEWORK, ROLLOUT, name_of_actor() or "worker")


def _engine_of(worker: Any, asks_itself: type | tuple[()] = ()) -> Any:
    """A worker's vLLM engine; ``None`` if the shim must not query the engine in this call.

    If an engine runs on several GPUs, only its first worker has the engine object. ``asks_itself``
    is a mixin whose own methods query the engine.
    """
    if isinstance(worker, asks_itself) or not in_force(FRAMEWORK, FEATURE, GROUP):
        return None
    return worker.llm


def _ask(worker: Any, engine: Any, sync: bool = False) -> None:
    if engine is not None:
        audit(engine, _whose(), count_sync(worker) if sync else 0)


class AskedWorker:
    """A mixin that queries a worker's engine; importable, so that Ray pickles it by reference.

    A method that receives weights returns ``False`` if the weight sync fails.
    """

    def post_init(self, *args: Any, **kwargs: Any) -> Any:
        """Query the engine after NeMo-RL has made all workers."""
        result = super().post_init(*args, **kwargs)  # type: ignore[misc]
        _ask(self, _engine_of(self))
        return result

    def update_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> Any:
        """Receive weights from the same GPU, and query the engine."""
        done = super().update_weights_via_ipc_zmq(*args, **kwargs)  # type: ignore[misc]
        _ask(self, _engine_of(self) if done else None, sync=True)
        return done

    def update_weights_from_collective(self, *args: Any, **kwargs: Any) -> Any:
        """Receive weights from other GPUs, and query the engine."""
        done = super().update_weights_from_collective(*args, **kwargs)  # type: ignore[misc]
        _ask(self, _engine_of(self) if done else None, sync=True)
        return done


@seam(
    feature=FEATURE,
    at=[*_actor_class(SYNC)],
    why=EXPORTED,
    delete_when=_DELETE,
    replaces=True,
)
def redecorate(actor_class: Any) -> Any:
    """See ``audit.redecorate``."""
    return put_in_front(AskedWorker, actor_class)


@seam(feature=FEATURE, at=_methods(SYNC, _NEW), why=INHERITED, delete_when=_DELETE)
def ask_new(call: Call) -> Any:
    """Query the engine of a new worker that does not inherit from ``AskedWorker``."""
    result = call.proceed()
    _ask(call.instance, _engine_of(call.instance, AskedWorker))
    return result


@seam(feature=FEATURE, at=_methods(SYNC, *_SYNCS), why=INHERITED, delete_when=_DELETE)
def ask_after_sync(call: Call) -> Any:
    """After each weight sync that the audit selects (``is_due``), query the worker's engine."""
    done = call.proceed()
    _ask(call.instance, _engine_of(call.instance, AskedWorker) if done else None, sync=True)
    return done


async def _ask_async(worker: Any, engine: Any, sync: bool = False) -> None:
    if engine is not None:
        await audit_async(engine, _whose(), count_sync(worker) if sync else 0)


class AskedAsyncWorker:
    """See ``AskedWorker``."""

    async def post_init_async(self, *args: Any, **kwargs: Any) -> Any:
        """Query the engine after NeMo-RL has made all workers."""
        result = await super().post_init_async(*args, **kwargs)  # type: ignore[misc]
        await _ask_async(self, _engine_of(self))
        return result

    async def update_weights_via_ipc_zmq_async(self, *args: Any, **kwargs: Any) -> Any:
        """Receive weights from the same GPU, and query the engine."""
        method = super().update_weights_via_ipc_zmq_async  # type: ignore[misc]
        done = await method(*args, **kwargs)
        await _ask_async(self, _engine_of(self) if done else None, sync=True)
        return done

    async def update_weights_from_collective_async(self, *args: Any, **kwargs: Any) -> Any:
        """Receive weights from other GPUs, and query the engine."""
        method = super().update_weights_from_collective_async  # type: ignore[misc]
        done = await method(*args, **kwargs)
        await _ask_async(self, _engine_of(self) if done else None, sync=True)
        return done


@seam(
    feature=FEATURE,
    at=[*_actor_class(ASYNC, "_async")],
    why=EXPORTED,
    delete_when=_DELETE,
    replaces=True,
)
def redecorate_async(actor_class: Any) -> Any:
    """See ``redecorate``."""
    return put_in_front(AskedAsyncWorker, actor_class)


@seam(feature=FEATURE, at=_methods(ASYNC, f"{_NEW}_async"), why=INHERITED, delete_when=_DELETE)
async def ask_new_async(call: Call) -> Any:
    """See ``ask_new``."""
    result = await call.proceed()
    await _ask_async(call.instance, _engine_of(call.instance, AskedAsyncWorker))
    return result


@seam(
    feature=FEATURE,
    at=_methods(ASYNC, *(f"{name}_async" for name in _SYNCS)),
    why=INHERITED,
    delete_when=_DELETE,
)
async def ask_after_sync_async(call: Call) -> Any:
    """See ``ask_after_sync``."""
    done = await call.proceed()
    engine = _engine_of(call.instance, AskedAsyncWorker) if done else None
    await _ask_async(call.instance, engine, sync=True)
    return done
