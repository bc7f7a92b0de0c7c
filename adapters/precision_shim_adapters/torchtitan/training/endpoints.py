"""Make a Monarch actor's endpoint again, with the shim's code around the actor's method.

Monarch looks up an endpoint object by name, and would not call a wrapper around the object.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from precision_shim.errors import SeamError

UNSCALES = "_precision_shim_unscales"
"""Attribute that marks an endpoint that unscales its trainer's gradients."""


def remake(
    endpoint: Any, act: Callable[[Any, Callable[[], Awaitable[Any]]], Awaitable[Any]], **marks: Any
) -> Any:
    """Make an endpoint that calls ``act`` and has the old endpoint's name.

    ``act`` gets the actor and a function that calls the old method. ``marks`` are set on the new
    endpoint as attributes; ``UNSCALES`` is copied from the old one.

    Raises:
        SeamError: the endpoint was not made by ``concurrent_endpoint``.
    """
    from monarch.actor import concurrent_endpoint

    method = getattr(getattr(endpoint, "_method", None), "__wrapped__", None)
    if method is None or not hasattr(endpoint, "_propagator"):
        raise SeamError(f"{endpoint!r} is not an endpoint as concurrent_endpoint makes it")

    @functools.wraps(method)
    async def acting(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await act(self, lambda: method(self, *args, **kwargs))

    made = concurrent_endpoint(acting, propagate=endpoint._propagator)
    made.__set_name__(None, method.__name__)  # Python calls __set_name__ only in a class body
    if hasattr(endpoint, UNSCALES):
        marks.setdefault(UNSCALES, True)
    for name, value in marks.items():
        setattr(made, name, value)
    return made
