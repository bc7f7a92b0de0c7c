"""Check all, then apply; undo from what was recorded; report everything.

For each adapter the engine waits for one of its target modules to be imported. Then it checks all
seams of the adapter from source, and per feature and path either patches all of them, those of
modules that are imported later as they come, or none. What turns out otherwise when such a module
is really there rolls the whole group back.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .._status import SeamStatus
from ..errors import SeamError
from ._imports import Watcher
from ._records import Adapter, Seam
from ._source import look
from ._wrapper import SeamWrapper, resolve

_ABSENT = object()

_Group = tuple[str, str, str]
"""Framework, feature, path: what is patched whole or not at all."""


@dataclass
class _Layer:
    """One wrapper function over a symbol, and the groups that need it."""

    key: str
    function: Callable[..., Any]
    owner: str
    groups: set[_Group]


@dataclass
class _Site:
    """One patched symbol: what was there, the layers over it (innermost first), what is there."""

    target: str
    parent: Any
    name: str
    raw: Any
    original: Any
    layers: list[_Layer] = field(default_factory=list)
    top: Any = None

    def holds(self) -> bool:
        """Whether the symbol is still what the engine put there."""
        return vars(self.parent).get(self.name) is self.top


@dataclass
class _Planned:
    """One seam of one adapter with what is known about it."""

    adapter: Adapter
    seam: Seam
    state: str = "pending"
    reason: str = ""

    @property
    def group(self) -> _Group:
        return self.adapter.framework, self.seam.feature, self.seam.path


class Engine:
    """Patches the seams of adapters, and takes them out again.

    Thread-safe. It never raises from within an import; what it cannot do goes to ``on_fault``.
    """

    def __init__(
        self,
        *,
        features: Iterable[str],
        settings: Any,
        strict: bool,
        on_fault: Callable[[str, SeamError], None],
        describe: Callable[[Adapter], str],
    ) -> None:
        """Make an engine that has patched nothing yet.

        Args:
            features: names of the features in force; seams of others stay untouched.
            settings: handed to native probes; the engine does not look inside.
            strict: whether a fault is raised where a feature would first take effect.
            on_fault: called with the framework's name and the error, once per refused group.
            describe: framework name and version, for messages.
        """
        self._features = frozenset(features)
        self._settings = settings
        self._strict = strict
        self._on_fault = on_fault
        self._describe = describe
        self._lock = threading.RLock()
        self._plans: dict[str, list[_Planned]] = {}
        self._checked: set[str] = set()
        self._faults: dict[str, list[SeamError]] = {}
        self._refused: set[_Group] = set()
        self._sites: list[_Site] = []
        self._watcher = Watcher(self._imported)
        self._live = True

    # -- adding ---------------------------------------------------------------------------

    def add(self, adapter: Adapter) -> None:
        """Take on an adapter: patch what is loaded, wait for what is not. A second time: no-op."""
        with self._lock:
            if adapter.framework in self._plans:
                return
            plan = [_Planned(adapter, seam) for seam in adapter.seams]
            self._plans[adapter.framework] = plan
            for one in plan:
                if one.seam.feature not in self._features:
                    one.state = "off"
            wanted = {one.seam.module for one in plan if one.state != "off"}
            if self._strict:
                wanted |= {target.partition(":")[0] for target in adapter.effects}
            self._watcher.watch(wanted)
            for module in wanted:
                if _loaded(module) is not None:
                    self._arrived(module)

    def fault(self, framework: str, error: SeamError, effects: Iterable[str]) -> None:
        """Keep an error for a framework whose adapter could not even be loaded."""
        with self._lock:
            self._faults.setdefault(framework, []).append(error)
            self._on_fault(framework, error)
            if self._strict:
                self._trip_all(framework, tuple(effects))

    def _imported(self, module: str) -> None:
        with self._lock:
            if self._live:
                self._arrived(module)

    def _arrived(self, module: str) -> None:
        # Trip-wires first: they are innermost, and a fault of this very module must find them.
        for framework, plan in self._plans.items():
            mine = [one for one in plan if one.seam.module == module and one.state != "off"]
            adapter = plan[0].adapter if plan else None
            if mine and framework not in self._checked:
                self._checked.add(framework)
                self._check(plan)
            if self._strict and adapter is not None:
                self._trip_all(framework, adapter.effects, module)
            # All that wait, not only this module's: one whose import was under way in another
            # thread when the watcher was put in place has not been reported.
            for one in plan if framework in self._checked else ():
                if (
                    one.state == "pending"
                    and one.group not in self._refused
                    and (one.seam.module == module or _loaded(one.seam.module) is not None)
                ):
                    self._apply(one)

    # -- checking -------------------------------------------------------------------------

    def _check(self, plan: list[_Planned]) -> None:
        problems: dict[_Group, list[str]] = {}
        for one in plan:
            if one.state == "off":
                continue
            symbol = look(one.seam.target, skip=self._watcher)
            if not one.seam.wrapper:  # a record of what the framework does itself
                native = resolve(one.seam.native)(symbol, self._settings) if symbol.found else None
                one.state, one.reason = ("native", native) if native else ("absent", symbol.problem)
                continue
            if not symbol.module_found and one.seam.optional:
                one.state, one.reason = "absent", symbol.problem
                continue
            problem = symbol.problem or _missing(one.seam, symbol.parameters, symbol.names)
            if problem:
                if one.seam.refusal:  # nothing is patched there, so nothing need hold
                    one.state, one.reason = "absent", problem
                else:
                    problems.setdefault(one.group, []).append(problem)
                continue
            if one.seam.native:
                reason = resolve(one.seam.native)(symbol, self._settings)
                if reason:
                    one.state, one.reason = "native", reason
                    continue
            one.reason = one.seam.refusal
        for group, found in problems.items():
            self._refuse(group, found)

    def _refuse(self, group: _Group, problems: list[str]) -> None:
        """Take a whole group out, keep why, and say so."""
        if group in self._refused:
            return
        self._refused.add(group)
        framework, feature, path = group
        plan = self._plans[framework]
        adapter = plan[0].adapter
        for site in list(self._sites):
            for layer in list(site.layers):
                layer.groups.discard(group)
                if not layer.groups:
                    before = site.top
                    site.layers.remove(layer)
                    self._rebuild(site)
                    _sweep({id(before): site.top if site.layers else site.original})
        for one in plan:
            if one.group == group and one.state in ("pending", "wrapped", "native"):
                own = [text for text in problems if one.seam.target in text]
                one.state = "refused"
                one.reason = "; ".join(own) or "refused whole, because: " + problems[0]
        error = SeamError(
            f"{self._describe(adapter)}: {feature}{f' on the {path} path' if path else ''} is "
            f"refused whole: {'; '.join(problems)}. Tested versions: "
            f"{', '.join(adapter.tested)}. Install one of these, or leave the feature out with "
            f"PRECISION_SHIM_FEATURES=-{feature}."
        )
        self._faults.setdefault(framework, []).append(error)
        self._on_fault(framework, error)

    # -- applying -------------------------------------------------------------------------

    def _apply(self, one: _Planned) -> None:
        seam = one.seam
        try:
            problem = _live_problem(seam, _locate(seam.target)[2])
            if problem:
                raise SeamError(problem)
            function = resolve(seam.wrapper)
        except Exception as error:  # a broken adapter must not break the framework's import
            self._refuse(one.group, [f"{seam.target}: {error}"])
            return
        owner = f"precision_shim:{one.adapter.framework}"
        site = self._site(seam.target)
        for layer in site.layers:
            if layer.key == seam.wrapper:
                layer.groups.add(one.group)
                break
        else:
            site.layers.append(_Layer(seam.wrapper, function, owner, {one.group}))
        unreached = self._rebuild(site, seam.aliases)
        # A seam that only refuses is in place to say so; its state tells the user "refused".
        one.state = "refused" if seam.refusal else "wrapped"
        one.reason = seam.refusal
        if unreached:
            one.reason = f"not reached, holds something else: {', '.join(unreached)}"

    def _site(self, target: str) -> _Site:
        """The place where a target is patched; a new one when another tool has wrapped ours."""
        parent, name, raw = _locate(target)
        for site in self._sites:
            if site.parent is parent and site.name == name and site.holds():
                return site
        site = _Site(target, parent, name, raw, getattr(parent, name), top=raw)
        self._sites.append(site)
        return site

    def _rebuild(self, site: _Site, aliases: Iterable[str] = ()) -> list[str]:
        """Put a site's layers in place anew; returns the aliases that could not be reached."""
        if not site.holds():
            return []
        before = site.top if isinstance(site.top, SeamWrapper) else site.original
        top = site.raw
        for layer in site.layers:
            top = SeamWrapper(
                top, layer.function, target=site.target, owner=layer.owner, enabled=self._is_live
            )
        site.top = top
        setattr(site.parent, site.name, top)
        now = top if site.layers else site.original
        unreached = []
        for alias in aliases:
            module, _, attribute = alias.partition(":")
            holder = sys.modules.get(module)
            if holder is None or attribute not in vars(holder):
                continue
            if vars(holder)[attribute] is before:
                setattr(holder, attribute, now)
            elif not isinstance(vars(holder)[attribute], SeamWrapper):
                unreached.append(alias)
        if not site.layers:
            self._sites.remove(site)
        return unreached

    def _is_live(self) -> bool:
        return self._live

    # -- strict: faults are raised where a feature would take effect -----------------------

    def _trip_all(self, framework: str, effects: tuple[str, ...], module: str = "") -> None:
        for target in effects:
            home = target.partition(":")[0]
            if module and home != module:
                continue
            if home != module and _loaded(home) is None:
                self._watcher.watch([home])
                continue
            key = f"fault:{framework}"
            try:
                site = self._site(target)
            except Exception:  # an effect that this version lacks cannot take place
                continue
            if any(layer.key == key for layer in site.layers):
                continue

            def trip(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
                faults = self._faults.get(framework)
                if faults:
                    raise faults[0]
                return wrapped(*args, **kwargs)

            group = (framework, "strict", target)
            site.layers.append(_Layer(key, trip, f"precision_shim:{framework}", {group}))
            self._rebuild(site)

    # -- undoing --------------------------------------------------------------------------

    def remove(self) -> list[str]:
        """Undo everything, newest first.

        Returns:
            What could not be restored because another tool has wrapped it since; our wrapper is
            left beneath the other one and passes every call through.
        """
        with self._lock:
            self._live = False
            self._watcher.remove()
            left = []
            gone: dict[int, Any] = {}
            for site in reversed(self._sites):
                if site.holds():
                    setattr(site.parent, site.name, site.raw)
                    gone[id(site.top)] = site.original
                else:
                    left.append(
                        f"{site.target} was changed by someone else since and is left as it is"
                    )
            _sweep(gone)
            self._sites.clear()
            self._plans.clear()
            self._checked.clear()
            self._faults.clear()
            self._refused.clear()
            return left

    # -- reporting ------------------------------------------------------------------------

    def report(self, framework: str) -> tuple[SeamStatus, ...]:
        """States of a framework's seams, in the order of its table."""
        with self._lock:
            return tuple(
                SeamStatus(one.seam.target, one.seam.feature, one.state, one.reason)
                for one in self._plans.get(framework, ())
            )

    def faults(self, framework: str) -> tuple[SeamError, ...]:
        """What was refused for a framework, oldest first."""
        with self._lock:
            return tuple(self._faults.get(framework, ()))

    def preview(self, adapter: Adapter) -> tuple[SeamStatus, ...]:
        """What would happen to an adapter's seams, from source alone; patches nothing."""
        ghost = Engine(
            features=self._features,
            settings=self._settings,
            strict=False,
            on_fault=lambda framework, error: None,
            describe=self._describe,
        )
        plan = [_Planned(adapter, seam) for seam in adapter.seams]
        for one in plan:
            if one.seam.feature not in self._features:
                one.state = "off"
        ghost._plans[adapter.framework] = plan
        ghost._check(plan)
        for one in plan:
            if one.state == "pending" and one.seam.refusal:
                one.state = "refused"
        return ghost.report(adapter.framework)


def _loaded(module: str) -> Any:
    found = sys.modules.get(module)
    if found is None:
        return None
    # A module that is still running its own code will be reported by the watcher.
    spec = getattr(found, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else found


def _locate(target: str) -> tuple[Any, str, Any]:
    """Find a target's parent, the last name, and the raw value there (descriptor and all)."""
    module, _, attribute = target.partition(":")
    parent: Any = sys.modules[module]
    *path, name = attribute.split(".")
    for part in path:
        parent = getattr(parent, part)
    raw = vars(parent).get(name, _ABSENT)
    if raw is _ABSENT:
        raise SeamError(f"{target} not found in the imported module")
    return parent, name, raw


def _sweep(gone: Mapping[int, Any]) -> None:
    """Give modules that imported a wrapper by value the original back.

    ``vars`` and not ``getattr``: a look must not fire lazy modules.
    """
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            if id(value) in gone and isinstance(value, SeamWrapper):
                names[name] = gone[id(value)]


def _missing(seam: Seam, parameters: Iterable[str], names: Iterable[str]) -> str:
    lacking = [one for one in seam.parameters if one not in set(parameters)]
    if lacking:
        return f"{seam.target} has no parameter {', '.join(map(repr, lacking))}"
    lacking = [one for one in seam.relies_on if one not in set(names)]
    if lacking:
        return f"{seam.target}: its source no longer mentions {', '.join(map(repr, lacking))}"
    return ""


def _live_problem(seam: Seam, raw: Any) -> str:
    """Compare the object that is really there with what was read from source."""
    function = getattr(raw, "__func__", raw)
    if not callable(function):
        return f"{seam.target} is not callable: {function!r}"
    if not seam.parameters:
        return ""
    try:
        signature: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ""
    if any(one.kind is one.VAR_KEYWORD for one in signature.values()):
        return ""
    return _missing(replace(seam, relies_on=()), signature, ())
