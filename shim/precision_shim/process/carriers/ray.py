"""Pass the shim's variables to a Ray job's workers, so that all nodes have the same variables.

A raylet keeps the environment that it inherited at its start. A variable that is set later, or on
another node, does not reach the raylet's workers. This module therefore wraps ``ray.init`` and
merges the shim's variables into the job's ``runtime_env["env_vars"]``, except those that the
runtime_env of the caller or of ``ray job submit`` already contains (Ray raises an error for a key
that both set). A setup hook of Ray's workers would fail in a worker environment without this
package, and Ray accepts only one, which the user may need.

This module does not use ``precision_shim.seams``, which would need 200 ms in each of Ray's agents
and workers to import wrapt and to parse the 4,000 lines of ``ray._private.worker``. The wrapper of
``ray.init`` is a plain function, which is pickled by reference.
"""

import functools
import json
import os
import sys

from ..finders import Watcher
from ..names import VARIABLE
from . import variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_MODULE = "ray._private.worker"
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_watcher: "Watcher | None" = None
_original: "Any" = None
_ours: "Any" = None


def enter() -> None:
    """Wrap ``ray.init``, now or when Ray is imported; a second call does nothing."""
    global _watcher
    if _watcher is not None:
        return
    _watcher = Watcher(lambda name: _wrap(sys.modules[name]))
    _watcher.watch([_MODULE])
    module = sys.modules.get(_MODULE)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        _wrap(module)


def leave() -> None:
    """Restore ``ray.init``; if another tool wrapped our wrapper, ours calls only ``ray.init``."""
    global _watcher, _original, _ours
    if _watcher is not None:
        _watcher.remove()
        _watcher = None
    if _ours is not None:
        _replace(_ours, _original)
        _original = _ours = None


def _wrap(module: "ModuleType") -> None:
    global _original, _ours
    original = getattr(module, "init", None)
    if original is None or _ours is not None:
        return

    @functools.wraps(original)
    def init(*args: "Any", **kwargs: "Any") -> "Any":
        return original(*args, **(_with_variables(kwargs) if _ours is init else kwargs))

    _original, _ours = original, init
    _replace(original, init)


def _replace(before: "Any", now: "Any") -> None:
    for name in (_MODULE, "ray"):  # ray/__init__.py has a copy of init
        module = sys.modules.get(name)
        if module is not None and vars(module).get("init") is before:
            setattr(module, "init", now)  # noqa: B010  (mypy would reject module.init = now)


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
