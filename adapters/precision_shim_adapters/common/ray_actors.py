"""Find the plain class from which Ray made an actor class, and make the actor class again.

``ray.remote`` copies a class's methods when it decorates the class, before a post-import hook can
patch the methods: an adapter that patches them makes the actor class again, with its options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from precision_shim.errors import SeamError


def plain_class(actor_class: Any) -> Any:
    """The class that ``ray.remote`` decorated; ``None`` if the argument is no actor class."""
    modified = getattr(getattr(actor_class, "__ray_metadata__", None), "modified_class", None)
    return getattr(modified, "__ray_actor_class__", None)


def make_again(actor_class: Any, plain: Any) -> Any:
    """Make an actor class from a plain class, with the options of another actor class."""
    import ray

    options = dict(actor_class._default_options)
    return ray.remote(**options)(plain) if options else ray.remote(plain)


def class_beneath(actor_class: Any) -> Any:
    """The class that ``ray.remote`` decorated.

    Raises:
        SeamError: the argument is no actor class made by ``ray.remote``.
    """
    worker = plain_class(actor_class)
    if worker is None:
        import ray

        raise SeamError(f"{actor_class!r} is not an actor class as Ray {ray.__version__} makes it")
    return worker


def put_in_front(mixin: type, actor_class: Any) -> Any:
    """Make an actor class again with a mixin as the worker's first base class.

    The mixin must be importable, so that Ray pickles it by reference. Its methods may take
    ``*args, **kwargs``: the new class declares them with the framework's signatures, so that Ray
    still rejects wrong arguments in the calling process.

    Raises:
        SeamError: the argument is no actor class made by ``ray.remote``.
    """
    worker = class_beneath(actor_class)
    namespace = {name: getattr(worker, name) for name in ("__module__", "__qualname__", "__doc__")}
    for name, method in vars(mixin).items():
        if inspect.isfunction(method) and hasattr(worker, name):
            namespace[name] = _imitate(getattr(worker, name), method)
    return make_again(actor_class, type(worker)(worker.__name__, (mixin, worker), namespace))


def _imitate(beneath: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that calls ``method``, and has the signature, name and doc of ``beneath``."""

    # ``call`` must read no global of this module, because Ray pickles the class by value and would
    # pickle the globals as well.
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    # Leave out ``__wrapped__``, because Ray would follow it and pickle the framework's method, too.
    functools.update_wrapper(call, beneath)
    del call.__wrapped__  # type: ignore[attr-defined]
    call.__signature__ = inspect.signature(beneath)  # type: ignore[attr-defined]
    return call
