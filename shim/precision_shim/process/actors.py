"""Ask each process that a framework starts with Ray whether it has the shim, without waiting.

A worker without the package starts as if ``PRECISION_SHIM`` were not set, and cannot say so: the
process that starts it asks it. A new actor answers before any of its methods.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .._about import __version__
from ..errors import PartialInstallationError
from ..reporting import journal as _journal
from . import standby
from .framework import Adapter
from .marks import PATIENCE
from .names import OFF
from .settings import PREFIX
from .wrapping import Wrapping

_GET, _CALL = "ray:get", "ray.actor:ActorMethod._remote"
_STARTS = "ray.actor:ActorClass._remote", "ray.remote_function:RemoteFunction._remote"
"""Ray's functions that wait for an answer, that call an actor's method (whose answer the caller may
await), and that start an actor and a task."""


class Actors:
    """What this process asks of the processes that it starts with Ray, during one ``install()``."""

    def __init__(self, awake: Mapping[str, Adapter], strict: bool) -> None:
        self._awake = awake
        self._strict = strict
        self._wrapping = Wrapping([_GET, _CALL, *_STARTS], self._wrapper)
        self.enter, self.leave = self._wrapping.enter, self._wrapping.leave
        self._get: Any = None
        self._waiting: dict[Any, str] = {}
        self._late: set[Any] = set()
        """Answers for which a call has waited once; no other call does."""
        self._tasks: set[str] = set()
        self._message = ""

    def _wrapper(self, place: str, original: Any) -> Callable[..., Any]:
        if place == _GET:
            self._get = original

        def ours(*args: Any, **kwargs: Any) -> Any:
            if place not in _STARTS:
                self._hear(PATIENCE if place == _GET and self._strict else 0)
            result = original(*args, **kwargs)
            if place == _GET:
                self._hear(0)
            elif place in _STARTS and self._wrapping.on and not self._message and standby.asked():
                try:
                    self._ask(args[0], result, kwargs)
                except PartialInstallationError:
                    raise
                except Exception as error:  # such as Ray's client, or a later Ray
                    _journal.log(f"whether Ray's workers have the shim is not known: {error!r}")
            return result

        return ours

    def _ask(self, starter: Any, started: Any, given: Mapping[str, Any]) -> None:
        task = getattr(starter, "_function", None)
        kind = task or starter.__ray_metadata__.modified_class.__ray_actor_class__
        first = next(iter(given.get("args") or ()), "")
        first = first if isinstance(first, str) else ""
        name, *bases = map(_name_of, [task] if task else kind.__mro__)
        ours = any(
            one.actors and re.match(one.actors, f"{one_name} {first}")
            for one in self._awake.values()
            for one_name in (name, *bases)
        )
        if name in self._tasks or not ours:
            return
        look = _looker()
        if task:
            import ray

            self._tasks.add(name)
            options = {key: given[key] for key in ("runtime_env",) if given.get(key)}
            reference = ray.remote(num_cpus=0, max_retries=0, **options)(look).remote()
        else:
            reference = started.__ray_call__.remote(look)
        self._waiting[reference] = name

    def _hear(self, seconds: float) -> None:
        """Wait ``seconds`` for new answers; judge those that are here; in strict mode raise, once.

        A thread of Ray must not read an answer: it would wait for the lock under which an actor
        imports its class, and a class of SkyRL waits for that thread when it is imported.
        """
        if not (self._waiting and self._wrapping.on and self._get):
            return
        import ray

        waiting, self._waiting = self._waiting, {}
        fresh = [one for one in waiting if one not in self._late] if seconds else []
        if fresh:
            self._late.update(ray.wait(fresh, num_returns=len(fresh), timeout=seconds)[1])
        ready, late = ray.wait([*waiting], num_returns=len(waiting), timeout=0)
        self._waiting.update((one, waiting[one]) for one in late)
        self._late.difference_update(ready)
        for one in ready:
            with contextlib.suppress(Exception):  # the process has ended
                self._judge(waiting[one], *self._get(one))
        if self._message and self._strict:
            self._strict = False
            raise PartialInstallationError(self._message)

    def _judge(self, name: str, switch: str, found: bool, version: str | None, place: str) -> None:
        if self._message or version == __version__ or switch in OFF:
            return
        lacks = "" if found else ", the package is not installed there"
        why = f"version {version}" if version else f"{PREFIX}={switch or 'unset'}{lacks}"
        self._message = (
            f"precision_shim {__version__}: {name}, which this process started on Ray, and perhaps "
            f"others run unpatched ({why}; {place}). Install precision-shim in the image of every "
            'node, or by runtime_env={"pip": [...]} (py_modules bring no start-up file: the '
            f"workers also have to import precision_shim.autoinstall), and set {PREFIX}=1 in its "
            f'"env_vars"; or set {PREFIX}=0 for all.'
        )
        if not self._strict:
            _journal.warn_or_say(self._message)


def _name_of(kind: Any) -> str:
    module = kind.__module__
    if module == "__main__":  # python -m MODULE
        spec = getattr(sys.modules[module], "__spec__", None)
        module = getattr(spec, "name", module)
    return f"{module}.{kind.__qualname__}"


def _looker() -> Callable[..., tuple[str, bool, str | None, str]]:
    # A local function that reads no global: Ray pickles it by value, for a process without us.
    def look(*_: object) -> tuple[str, bool, str | None, str]:
        import importlib.util
        import os
        import platform
        import sys

        switch = os.environ.get("PRECISION_SHIM", "").strip().lower()
        found = importlib.util.find_spec("precision_shim") is not None
        version = getattr(sys.modules.get("precision_shim"), "__version__", None)
        return switch, found, version, f"{sys.executable} on {platform.node()}"

    return look
