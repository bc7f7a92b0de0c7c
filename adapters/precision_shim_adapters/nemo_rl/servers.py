"""NeMo-RL: query the generation workers' SGLang servers for their dtypes, for the audit.

A generation worker starts SGLang's HTTP server in a separate process. The shim queries the servers
from the driver, which has their URLs. The driver also makes the last call of each weight sync,
which tells the servers to allocate their KV caches again.
"""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, is_there, seam
from precision_shim.auditing import sending
from precision_shim.auditing.halves import ROLLOUT

from ..rollout.held import Whose, count_sync, is_due
from ..rollout.held_sglang import audit_server, unasked
from .dtensor import FRAMEWORK

FEATURE, GROUP = "audit", "sglang servers"
_GENERATION = "nemo_rl.models.generation.sglang.sglang_generation:SGLangGeneration"
_DELETE = "NeMo-RL says which precision its rollouts have"
_URLS = ("get_rollout_engine_urls", "get_sglang_server_urls")
"""Methods that return the servers' URLs, in NeMo-RL 0.7 and in 0.6."""

_LAST = ["kv_cache"]
"""Tags of the last call in a weight sync."""


def why_not_asked(backend: str) -> str:
    """The reason why the shim cannot query a backend's engines; empty if it can."""
    if backend == "vllm" or (backend == "sglang" and is_there(_GENERATION)):
        return ""
    return f"NeMo-RL's workers of {backend} are not asked"


@seam(
    f"{_GENERATION}.__init__",
    FEATURE,
    group=GROUP,
    only_if=(_GENERATION,),
    why="has started the servers when it ends",
    delete_when=_DELETE,
    optional=True,
)
def ask_new(call: Call) -> None:
    """Query the new servers for their dtypes."""
    call.proceed()
    _ask(call.instance)


@seam(
    f"{_GENERATION}.prepare_for_generation",
    FEATURE,
    group=GROUP,
    only_if=(_GENERATION,),
    why="the last call of each weight sync, after the servers have the weights",
    delete_when=_DELETE,
    optional=True,
)
def ask_after_sync(call: Call, tags: Any = None) -> Any:
    """After each weight sync that the audit selects (``is_due``), query the servers again."""
    result = call.proceed()
    if tags == _LAST:
        _ask(call.instance, count_sync(call.instance))
    return result


def _ask(generation: Any, sync: int = 0) -> None:
    if not is_due(sync):
        return
    try:
        method = next(name for name in _URLS if hasattr(generation, name))
        urls = sorted(filter(None, getattr(generation, method)()))
    except Exception as error:  # a failed audit must not end a rollout
        sending.write(unasked(Whose(FRAMEWORK, ROLLOUT, "servers"), sync, error))
        return
    for url in urls:
        audit_server(url, Whose(FRAMEWORK, ROLLOUT, url.partition("://")[2]), sync)
