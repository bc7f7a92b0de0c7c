"""Pass the shim's variables and patched actor classes to SkyRL's other processes."""

from __future__ import annotations

import json
import os
from typing import Any

from precision_shim.adapting import FEATURES, Call, seam
from precision_shim.process.carriers import variables

from ...common.ray_actors import make_again, plain_class


@seam(
    "skyrl.train.utils.utils:prepare_runtime_environment",
    FEATURES,
    group="ray",
    why="forwards a fixed list of variables to the workers",
    delete_when="it has a place for variables of others",
    relies_on=("env_vars",),
)
def carry_variables(call: Call) -> Any:
    """Add the shim's variables to the environment variables that a driver forwards to its workers.

    Ray rejects a key that ``ray job submit`` has already set.
    """
    env_vars = call.proceed()
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    submitted = (job.get("runtime_env") or {}).get("env_vars") or {}
    env_vars.update(variables(os.environ, leave_out={**submitted, **env_vars}))
    return env_vars


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
