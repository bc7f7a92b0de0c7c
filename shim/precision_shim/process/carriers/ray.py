"""Pass the shim's variables to a Ray job's workers, which a raylet's environment may lack.

``ray.init`` is wrapped to merge them into ``runtime_env["env_vars"]``, except keys that the caller
or ``ray job submit`` sets (Ray raises an error for a key in both). A setup hook would fail without
this package, and Ray accepts only one. ``seams`` would take 200 ms in each agent and worker.
"""

import json
import os
import sys

from ..names import VARIABLE
from ..wrapping import Wrapping
from . import variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MODULE = "ray._private.worker"
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def came_first() -> bool:
    """Whether this driver called ``ray.init`` before, without the shim's variable for the workers.

    It is not known with Ray's client, whose driver is another process.
    """
    module = sys.modules.get(_MODULE)
    worker: Any = getattr(module, "global_worker", None)
    if module is None or not worker.connected or worker.mode != module.SCRIPT_MODE:
        return False
    given = sys.modules["ray"].get_runtime_context().runtime_env
    return VARIABLE not in {**os.environ, **(given.get("env_vars") or {})}


def _wrapper(_: str, original: "Any") -> "Callable[..., Any]":
    def init(*args: "Any", **kwargs: "Any") -> "Any":
        return original(*args, **(_with_variables(kwargs) if _wrapping.on else kwargs))

    return init


def _with_variables(kwargs: "dict[str, Any]") -> "dict[str, Any]":
    try:
        given = kwargs.get("runtime_env")
        in_job = json.loads(os.environ.get(_JOB) or "{}").get("runtime_env") or {}
        if not given and not in_job:
            # Ray ignores the JobConfig's runtime_env if init() has its own: copy the JobConfig's.
            given = getattr(kwargs.get("job_config"), "runtime_env", None)
        given = dict(given or {})
        carried = {**(in_job.get("env_vars") or {}), **(given.get("env_vars") or {})}
        ours = variables(os.environ, leave_out=carried)
        if not ours:
            return kwargs
        given["env_vars"] = {**(given.get("env_vars") or {}), **ours}
        return {**kwargs, "runtime_env": given}
    except Exception as error:  # a job must start even if its workers start without the shim
        from ..standby import say

        say(
            f"the workers of this Ray job may be without the shim, its variables could not be "
            f"merged into ray.init's runtime_env: {error!r}. Put {VARIABLE} into "
            'runtime_env["env_vars"] yourself.'
        )
        return kwargs


_wrapping = Wrapping([f"{_MODULE}:init", "ray:init"], _wrapper)
enter, leave = _wrapping.enter, _wrapping.leave
