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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from .._finders import Watcher
from .._status import SeamStatus
from ..errors import PrecisionShimError, SeamError
from ._records import Adapter, Seam
from ._source import look
from ._wrapper import SeamWrapper, resolve

_ABSENT = object()

_Group = tuple[str, str, str]
"""Framework, feature, path: what is patched whole or not at all."""


@dataclass
class _Layer:
    """One wrapper function over a symbol, and the groups that need it; with none it is dead."""

    key: str
    function: Callable[..., Any]
    owner: str
    groups: set[_Group]
    replaces: bool = False
    made: tuple[Any, Any] | None = None  # what the function replaced, and by what

    def is_live(self) -> bool:
        """Asked at each call: a wrapper that someone has kept passes calls through when dead."""
        return bool(self.groups)

    def over(self, below: Any, target: str) -> Any:
        """What this layer puts over a symbol; a replacement is made once."""
        if not self.replaces:
            return SeamWrapper(
                below, self.function, target=target, owner=self.owner, enabled=self.is_live
            )
        if self.made is None or self.made[0] is not below:
            self.made = below, self.function(below)
        return self.made[1]


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
    stale: bool = False  # the module's code ran again and put something new there

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
        on_fault: Callable[[str, PrecisionShimError], None],
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
        self._faults: dict[str, list[PrecisionShimError]] = {}
        self._refused: set[_Group] = set()
        self._sites: list[_Site] = []
        self._effects: dict[str, tuple[str, ...]] = {}
        self._watcher = Watcher(self._imported)
        self._displaced: dict[int, tuple[Any, _Site]] = {}
        """What the engine had put at a site and has replaced since, by id."""
        self._live = True

    # -- adding ---------------------------------------------------------------------------

    def add(self, adapter: Adapter) -> None:
        """Take on an adapter: patch what is loaded, wait for what is not. A second time: no-op."""
        with self._lock:
            if adapter.framework in self._plans or not self._live:
                return
            plan = [_Planned(adapter, seam) for seam in adapter.seams]
            self._plans[adapter.framework] = plan
            for one in plan:
                if one.seam.feature not in self._features:
                    one.state = "off"
            self._effects[adapter.framework] = adapter.effects
            self._expect({one.seam.module for one in plan if one.state != "off"}, adapter.effects)
            self._reach_copies()

    def fault(self, framework: str, error: PrecisionShimError, effects: Iterable[str]) -> None:
        """Keep an error for a framework whose adapter could not even be loaded."""
        with self._lock:
            if not self._live:
                return
            self._faults.setdefault(framework, []).append(error)
            self._on_fault(framework, error)
            self._effects[framework] = tuple(effects)
            self._expect(set(), effects)
            self._reach_copies()

    def catch_up(self) -> None:
        """Wait for target modules whose import is under way in other threads, and patch them.

        Their code began before the engine's watcher was in place. Hold no lock that a module's
        code may want.
        """
        with self._lock:
            slow = [
                one.seam.module
                for plan in self._plans.values()
                for one in plan
                if one.state == "pending" and one.seam.module in sys.modules
            ]
        for module in dict.fromkeys(slow):
            with suppress(Exception):  # it belongs to the thread that imports it
                __import__(module)
            with self._lock:
                if self._live and _loaded(module) is not None:
                    self._arrived(module)
                    self._reach_copies()

    def _expect(self, modules: set[str], effects: Iterable[str]) -> None:
        if self._strict:
            modules = modules | {target.partition(":")[0] for target in effects}
        self._watcher.watch(modules)
        for module in modules:
            if _loaded(module) is not None:
                self._arrived(module)

    def _imported(self, module: str) -> None:
        with self._lock:
            if self._live:
                self._forget(module)
                self._arrived(module)
                self._reach_copies()

    def _forget(self, module: str) -> None:
        """A module's code has run: what was patched there before, if it was, is no more."""
        for site in self._sites:
            if site.target.partition(":")[0] == module and not site.holds():
                site.stale = True
        for plan in self._plans.values():
            for one in plan:
                placed = one.state == "wrapped" or (one.seam.refusal and one.state == "refused")
                if placed and one.seam.module == module and one.group not in self._refused:
                    one.state = "pending"

    def _arrived(self, module: str) -> None:
        done: set[str] = set()
        while True:
            # Trip-wires first: they are innermost, and a fault of this very module finds them.
            self._trip(module)
            # Anew each time: a wrapper's module may import a framework and so wake an adapter.
            framework = next((name for name in self._plans if name not in done), None)
            if framework is None:
                return
            done.add(framework)
            self._arrived_for(framework, module)

    def _arrived_for(self, framework: str, module: str) -> None:
        plan = self._plans[framework]
        if framework not in self._checked and any(
            one.seam.module == module and one.state != "off" for one in plan
        ):
            self._checked.add(framework)
            self._check(plan)
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
            try:
                problem = self._judge(one)
            except Exception as error:  # a broken adapter must not break the framework's import
                problem = f"{one.seam.target}: {one.seam.native} failed: {error!r}"
            if problem:
                problems.setdefault(one.group, []).append(problem)
        for group, found in problems.items():
            self._refuse(group, found)

    def _judge(self, one: _Planned) -> str:
        """Settle what source can settle of a seam; returns why its group must be refused."""
        seam, symbol = one.seam, look(one.seam.target)
        if not seam.wrapper:  # a record of what the framework does itself
            native = resolve(seam.native)(symbol, self._settings) if symbol.found else None
            one.state, one.reason = ("native", native) if native else ("absent", symbol.problem)
            return ""
        if not symbol.module_found and seam.optional:
            one.state, one.reason = "absent", symbol.problem
            return ""
        problem = symbol.problem or _missing(seam, symbol.parameters, symbol.names)
        if problem and seam.refusal:  # nothing is patched there, so nothing need hold
            one.state, one.reason = "absent", problem
            return ""
        if problem:
            return problem
        native = resolve(seam.native)(symbol, self._settings) if seam.native else None
        if native:
            one.state, one.reason = "native", native
        else:
            one.reason = seam.refusal
        return ""

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
                    site.layers.remove(layer)
                    self._rebuild(site)
        for one in plan:
            if one.group == group and one.state in ("pending", "wrapped"):
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
            site = self._site(seam.target)
            layer = next((layer for layer in site.layers if layer.key == seam.wrapper), None)
            if layer is not None:
                layer.groups.add(one.group)
            else:
                owner = f"precision_shim:{one.adapter.framework}"
                site.layers.append(
                    _Layer(seam.wrapper, function, owner, {one.group}, seam.replaces)
                )
                self._rebuild(site)
        except Exception as error:  # a broken adapter must not break the framework's import
            self._refuse(one.group, [f"{seam.target}: {error}"])
            return
        unreached = _reach(site, seam.aliases, self._displaced)
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

    def _rebuild(self, site: _Site) -> None:
        """Put a site's layers in place anew, also where modules hold what we had put there."""
        if not site.holds():
            return
        before, top = site.top, site.raw
        for layer in site.layers:
            top = layer.over(top, site.target)
        if top is not before:
            setattr(site.parent, site.name, top)
            site.top = top
        if before is not site.raw:
            self._displaced[id(before)] = before, site
        if not site.layers:
            self._sites.remove(site)

    def _reach_copies(self) -> None:
        """Give modules that hold by value what stood at a site what stands there now.

        Once for all sites: it looks at every name of every module.
        """
        if self._displaced:
            _sweep(
                {
                    key: (before, site.top if site.layers else site.original)
                    for key, (before, site) in self._displaced.items()
                }
            )
            self._displaced.clear()

    # -- strict: faults are raised where a feature would take effect -----------------------

    def _trip(self, module: str) -> None:
        """In strict mode, put a trip-wire into each effect that a module defines."""
        for framework, effects in self._effects.items() if self._strict else ():
            for target in effects:
                if target.partition(":")[0] != module:
                    continue
                try:
                    site = self._site(target)
                except Exception:  # an effect that this version lacks cannot take place
                    continue
                key = f"fault:{framework}"
                if any(layer.key == key for layer in site.layers):
                    continue
                group = (framework, "strict", target)
                owner = f"precision_shim:{framework}"
                site.layers.append(_Layer(key, self._raise_fault_of(framework), owner, {group}))
                self._rebuild(site)

    def _raise_fault_of(self, framework: str) -> Callable[..., Any]:
        def trip(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            faults = self._faults.get(framework)
            if faults:
                raise faults[0]
            return wrapped(*args, **kwargs)

        return trip

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
            gone: dict[int, tuple[Any, Any]] = {}
            for site in reversed(self._sites):
                gone[id(site.top)] = site.top, site.original
                for layer in site.layers:
                    layer.groups.clear()
                if site.holds():
                    setattr(site.parent, site.name, site.raw)
                elif not site.stale:
                    left.append(
                        f"{site.target} was changed by someone else since and is left as it is"
                    )
            _sweep(gone)
            self._displaced.clear()
            self._sites.clear()
            self._effects.clear()
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
                SeamStatus(
                    one.seam.target,
                    one.seam.feature,
                    one.state,
                    one.reason,
                    path=one.adapter.paths.get(one.seam.path, one.seam.path),
                    refusal=one.seam.refusal,
                    why=one.seam.why,
                    upstream=one.seam.upstream,
                    delete_when=one.seam.delete_when,
                )
                for one in self._plans.get(framework, ())
            )

    def faults(self, framework: str) -> tuple[PrecisionShimError, ...]:
        """What was refused for a framework, oldest first."""
        with self._lock:
            return tuple(self._faults.get(framework, ()))

    def is_refused(self, framework: str, feature: str, path: str) -> bool:
        """Whether a feature was refused whole on a path of a framework."""
        with self._lock:
            return (framework, feature, path) in self._refused

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


def _reach(
    site: _Site, aliases: Iterable[str], displaced: Mapping[int, tuple[Any, _Site]]
) -> list[str]:
    """Give declared aliases what the symbol now is; returns those that hold something else."""
    unreached = []
    for alias in aliases:
        module, _, attribute = alias.partition(":")
        names = _contents(sys.modules.get(module))
        if attribute not in names or names[attribute] is site.top:
            continue
        _, held = displaced.get(id(names[attribute]), (None, None))
        if names[attribute] is site.original or held is site:
            names[attribute] = site.top
        else:
            unreached.append(alias)
    return unreached


def _sweep(gone: Mapping[int, tuple[Any, Any]]) -> None:
    """Give modules that hold what we had put somewhere by value what it was replaced by."""
    for module in list(sys.modules.values()):
        names = _contents(module)
        for name, value in list(names.items()):
            if id(value) in gone and gone[id(value)][0] is value:
                names[name] = gone[id(value)][1]


def _contents(module: Any) -> dict[str, Any]:
    """A module's names; ``vars()`` and ``getattr`` would make a lazy module load itself."""
    try:
        names = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return names if isinstance(names, dict) else {}


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
