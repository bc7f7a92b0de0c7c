"""SkyRL: query the inference servers' vLLM engines for their dtypes, for the audit.

An inference server is a Ray actor that serves vLLM's HTTP endpoints and endpoints of SkyRL. SkyRL
adds its endpoints in a method that receives the engine, before the server starts. In SkyRL 0.4 and
later each weight sync ends with a request to vLLM's ``/finish_weight_update``. Before SkyRL 0.4,
only a request's body shows that a sync ends; the shim reads no bodies, so it queries no servers.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from precision_shim.adapting import Call, is_there, seam
from precision_shim.auditing import sending
from precision_shim.auditing.halves import ROLLOUT

from ..rollout.held import Whose, audit_async, count_sync
from .megatron import TRAIN

FEATURE, GROUP = "audit", "vllm servers"
_SERVER = f"{TRAIN}.inference_servers.vllm_server_actor:VLLMServerActor._add_custom_endpoints"
_ENDS_BY_ENDPOINT = f"{_SERVER} mentions _fetch_weights"
_END = "/finish_weight_update"

_asking: set[Any] = set()
"""References to running tasks: without a reference Python may garbage-collect a running task."""

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]


def why_not_asked() -> str:
    """The reason why the shim cannot query inference servers; empty if it can."""
    return "" if is_there(_ENDS_BY_ENDPOINT) else "SkyRL's inference servers are not asked"


class AskAfterSync:
    """An ASGI middleware that queries the engine before the server confirms the end of a sync.

    Args:
        app: the application that the middleware wraps.
        engine: the server's engine.
        whose: framework, role and name of the engine.
    """

    def __init__(self, app: Any, engine: Any, whose: Whose) -> None:
        self._app, self._engine, self._whose = app, engine, whose

    async def __call__(self, scope: Any, receive: Any, send: _Send) -> None:
        """Handle a request."""

        async def answer(message: _Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                await audit_async(self._engine, self._whose, count_sync(self._engine))
            await send(message)

        ends_a_sync = scope["type"] == "http" and scope["path"] == _END
        await self._app(scope, receive, answer if ends_a_sync else send)


@seam(
    _SERVER,
    FEATURE,
    group=GROUP,
    only_if=(_ENDS_BY_ENDPOINT,),
    why="has the engine and the application that is not served yet",
    delete_when="SkyRL says which precision its inference engines have",
    optional=True,
)
def ask_server(call: Call, app: Any, engine: Any, cli_args: Any) -> Any:
    """Query a new server's engine at its start, and again after some of the weight syncs."""
    result = call.proceed()
    if sending.is_wanted():
        whose = Whose("skyrl", ROLLOUT, f"server {socket.gethostname()}:{cli_args.port}")
        task = asyncio.get_running_loop().create_task(audit_async(engine, whose))
        _asking.add(task)
        task.add_done_callback(_asking.discard)
        behind = app.middleware_stack
        if behind is None:
            app.add_middleware(AskAfterSync, engine=engine, whose=whose)
        else:  # Starlette adds no middleware once its stack is built
            app.middleware_stack = AskAfterSync(behind, engine, whose)
    return result
