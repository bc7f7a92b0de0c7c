"""SkyRL's other processes: the shim's variables, and actor classes that hold what is patched."""

from __future__ import annotations

import json
import os
from typing import Any

from precision_shim.carriers import variables

from ..ray_actors import make_again, plain_class


def carry_variables(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``prepare_runtime_environment``, which forwards a fixed list of variables.

    Those that ``ray job submit`` carries already stay there: Ray takes no key twice.
    """
    env_vars = wrapped(*args, **kwargs)
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    submitted = (job.get("runtime_env") or {}).get("env_vars") or {}
    env_vars.update(variables(os.environ, leave_out={**submitted, **env_vars}))
    return env_vars


def renew_actor_class(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``PPORayActorGroup._initiate_actors``: make the actor class anew before it is sent.

    SkyRL's modules call ``ray.remote`` on their last lines, before anything in them is patched. Ray
    then keeps every method as it was and sends it by value, because its name now leads to another
    object: workers would run the unpatched methods, however well they are patched themselves.
    """
    instance.ray_actor_type = _renewed(instance.ray_actor_type)
    return wrapped(*args, **kwargs)


def _renewed(actor_class: Any) -> Any:
    plain = plain_class(actor_class)
    # None: a class that is no actor class yet, or one of another kind.
    return actor_class if plain is None else make_again(actor_class, plain)
