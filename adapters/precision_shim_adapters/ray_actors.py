"""Ray's actor classes: what is beneath one, and the same one made again.

``ray.remote`` copies a class's methods when it decorates it, which is before a post-import hook can
patch them. So an adapter that must be in an actor makes the actor class once more, under the same
name and with the same options.
"""

from __future__ import annotations

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

    The mixin has to be importable, so that Ray ships it by reference.

    Raises:
        SeamError: it is not what ``ray.remote`` makes of a class.
    """
    worker = class_beneath(actor_class)
    namespace = {name: getattr(worker, name) for name in ("__module__", "__qualname__", "__doc__")}
    return make_again(actor_class, type(worker)(worker.__name__, (mixin, worker), namespace))
