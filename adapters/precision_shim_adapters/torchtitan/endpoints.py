"""Endpoints of a Monarch actor, made again around what the actor's own do.

An endpoint is an object that an actor looks up by name; a wrapper around one is not called.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from precision_shim.errors import SeamError

UNSCALES = "_precision_shim_unscales"
"""The mark of an endpoint whose step unscales what its trainer has scaled."""


def remade(
    endpoint: Any, act: Callable[[Any, Callable[[], Awaitable[Any]]], Awaitable[Any]], **marks: Any
) -> Any:
    """Make an endpoint of the same name whose method is called by ``act``.

    Args:
        endpoint: what Monarch's ``concurrent_endpoint`` made.
        act: gets the actor and a function that calls the endpoint's own method; its result is the
            endpoint's.
        marks: attributes of the new endpoint, beside the mark that the old one has.

    Raises:
        SeamError: it is not what ``concurrent_endpoint`` makes.
    """
    from monarch.actor import concurrent_endpoint

    method = getattr(getattr(endpoint, "_method", None), "__wrapped__", None)
    if method is None or not hasattr(endpoint, "_propagator"):
        raise SeamError(f"{endpoint!r} is not an endpoint as concurrent_endpoint makes it")

    @functools.wraps(method)
    async def acting(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await act(self, lambda: method(self, *args, **kwargs))

    made = concurrent_endpoint(acting, propagate=endpoint._propagator)
    made.__set_name__(None, method.__name__)  # Python does this where a class is defined
    if hasattr(endpoint, UNSCALES):
        marks.setdefault(UNSCALES, True)
    for name, value in marks.items():
        setattr(made, name, value)
    return made
