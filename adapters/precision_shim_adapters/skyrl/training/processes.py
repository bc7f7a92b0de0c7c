"""Make SkyRL's actor classes again with the shim's patches."""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import FEATURES, Call, seam

from ...common.ray_actors import make_again, plain_class


@seam(
    "skyrl.backends.skyrl_train.workers.worker:PPORayActorGroup._initiate_actors",
    FEATURES,
    group="ray",
    why="the one place that starts workers; their actor classes were made while importing",
    delete_when="SkyRL decorates its workers where it starts them",
    relies_on=("ray_actor_type", "remote"),
)
def renew_actor_class(call: Call) -> Any:
    """Make the actor class again, with the shim's patches, before SkyRL starts a group of workers.

    SkyRL calls ``ray.remote`` before the shim patches its modules, and Ray would pickle the
    unpatched methods by value.
    """
    actor_class = call.instance.ray_actor_type
    plain = plain_class(actor_class)
    if plain is not None:
        call.instance.ray_actor_type = make_again(actor_class, plain)
    return call.proceed()
