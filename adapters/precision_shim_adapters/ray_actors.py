"""Ray's actor classes: what is beneath one, and the same one made again.

``ray.remote`` copies a class's methods when it decorates it, which is before a post-import hook can
patch them. So an adapter that must be in an actor makes the actor class once more, under the same
name and with the same options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from precision_shim.errors import SeamError


def plain_class(actor_class: Any) -> Any:
    """The class that ``ray.remote`` was called with; ``None`` if it is no actor class of Ray's."""
    modified = getattr(getattr(actor_class, "__ray_metadata__", None), "modified_class", None)
    return getattr(modified, "__ray_actor_class__", None)


def make_again(actor_class: Any, plain: Any) -> Any:
    """Make an actor class of a plain class, with the options of another actor class."""
    import ray

    options = dict(actor_class._default_options)
    return ray.remote(**options)(plain) if options else ray.remote(plain)


def class_beneath(actor_class: Any) -> Any:
    """``plain_class``, where anything else is an error.

    Raises:
        SeamError: it is not what ``ray.remote`` makes of a class.
    """
    worker = plain_class(actor_class)
    if worker is None:
        import ray

        raise SeamError(f"{actor_class!r} is not an actor class as Ray {ray.__version__} makes it")
    return worker


def put_in_front(mixin: type, actor_class: Any) -> Any:
    """Make an actor class of the same name and options whose methods are a mixin's first.

    The mixin has to be importable, so that Ray ships it by reference. Its methods may take
    ``*args, **kwargs``: those of the class that is made look like the framework's from outside, so
    that Ray refuses wrong arguments in the process that calls, as it does without the mixin.

    Raises:
        SeamError: it is not what ``ray.remote`` makes of a class.
    """
    worker = class_beneath(actor_class)
    namespace = {name: getattr(worker, name) for name in ("__module__", "__qualname__", "__doc__")}
    for name, method in vars(mixin).items():
        if inspect.isfunction(method) and hasattr(worker, name):
            namespace[name] = _looking_like(getattr(worker, name), method)
    return make_again(actor_class, type(worker)(worker.__name__, (mixin, worker), namespace))


def _looking_like(beneath: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that calls one method and has signature, name and doc of another."""

    # The function must read no name of this module: Ray ships the class by value, and would ship
    # those names with it.
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    functools.update_wrapper(call, beneath)
    # Ray follows it to the method beneath, and would ship that with the class.
    del call.__wrapped__  # type: ignore[attr-defined]
    call.__signature__ = inspect.signature(beneath)  # type: ignore[attr-defined]
    return call
