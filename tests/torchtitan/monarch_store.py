"""TorchStore, with a controller that the pinned Monarch accepts.

The controller in TorchStore's release on PyPI has plain endpoints beside async ones, and Monarch
refuses such an actor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchstore.api
from monarch.actor import endpoint
from torchstore import controller


def _as_async(method: Callable[..., Any]) -> Any:
    @endpoint
    async def call(self: Any, *given: Any, **named: Any) -> Any:
        return method(self, *given, **named)

    return call


class Controller(controller.Controller):
    """TorchStore's own controller; each of its endpoints is async."""

    for _name in (
        "get_controller_strategy",
        "keys",
        "locate_volumes",
        "notify_delete",
        "notify_put",
    ):
        locals()[_name] = _as_async(getattr(controller.Controller, _name)._method)


class Store:
    """TorchStore without ``direct_rdma``, which its release on PyPI does not have yet."""

    @staticmethod
    async def put_state_dict(state_dict: Any, key: str, direct_rdma: bool) -> None:
        await torchstore.put_state_dict(state_dict, key)

    @staticmethod
    async def get_state_dict(key: str, direct_rdma: bool, **more: Any) -> None:
        await torchstore.get_state_dict(key, **more)


async def start(mesh: Any) -> None:
    """Start TorchStore on the trainer's processes, as torchtitan's controller does."""
    torchstore.api.Controller = Controller
    await torchstore.initialize(mesh=mesh, strategy=torchstore.LocalRankStrategy())
