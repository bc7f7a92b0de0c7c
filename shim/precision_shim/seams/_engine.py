"""The engine that patches the seams of adapters as their target modules are imported.

At the first import of a target module the engine checks all of an adapter's seams against source
(``_plan``), and patches all or none of a group (``_sites``). If an imported module differs from its
source, all patches of the group are undone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any

from ..errors import PrecisionShimError, SeamError
from ..process.finders import Watcher
from ..process.forks import Lock, is_cut_off
from ..process.framework import Adapter
from ..reporting.record import SeamStatus
from ._call import prepare, through
from ._plan import Group, Proved, Row, check, list_unchecked, nothing_proved, refuse
from ._seam import Seam
from ._sites import Layer, Sites, locate
from ._source import Symbol

_lock = Lock()
"""The lock of all seam engines; a process has only one seam engine at a time."""


_REPLACED = (
    "another tool has replaced the shim's wrapper since install(), and may not call it. Call "
    "uninstall(), and install() after that tool"
)


@dataclass
class _Added:
    adapter: Adapter
    rows: tuple[Row, ...]
    checked: bool = False


class SeamEngine:
    """Patches the seams of adapters, and undoes the patches; thread-safe.

    It raises no error within an import, but passes every error to ``on_fault``.
    """

    def __init__(
        self,
        *,
        features: Iterable[str],
        settings: Any,
        strict: bool,
        on_fault: Callable[[str, PrecisionShimError], None],
        describe: Callable[[Adapter], str],
        missed: Callable[[Adapter], Callable[[str], str]] = lambda adapter: lambda target: "",
        proved: Callable[[], Proved] = lambda: nothing_proved,
    ) -> None:
        """Make a seam engine that has patched nothing yet.

        Args:
            features: names of the features in force; seams of other features are not patched.
            settings: passed to ``Seam.native``; the engine itself does not read the settings.
            strict: whether calls that build optimizers or DDPs (``effects``) raise seam errors.
            on_fault: called with the framework's name and the error, once per refused group of
                seams.
            describe: function that returns a framework's name and version, for messages.
            missed: function that returns ``had`` of ``check`` for an adapter.
            proved: function that returns ``proved`` of ``check`` for the present source.
        """
        self._features = frozenset(features)
        self._settings = settings
        self._strict = strict
        self._on_fault = on_fault
        self._describe = describe
        self._missed = missed
        self._proved = proved
        self._added: dict[str, _Added] = {}
        self._faults: dict[str, list[PrecisionShimError]] = {}
        self._refused: set[Group] = set()
        self._sites = Sites()
        self._effects: dict[str, tuple[str, ...]] = {}
        self._watcher = Watcher(self._on_import)
        self._live = True

    def add(self, adapter: Adapter) -> None:
        """Patch each seam of a new adapter, now or when the seam's module is imported."""
        with _lock:
            if adapter.framework in self._added or not self._live:
                return
            rows = list_unchecked(adapter, self._features, self._proved())
            self._added[adapter.framework] = _Added(adapter, rows)
            self._effects[adapter.framework] = adapter.effects
            self._expect({row.seam.module for row in rows if row.state != "off"}, adapter.effects)
            self._sites.reach_copies()

    def fault(self, framework: str, error: PrecisionShimError, effects: Iterable[str]) -> None:
        """Record an error for a framework whose adapter could not be loaded."""
        with _lock:
            if not self._live:
                return
            self._faults.setdefault(framework, []).append(error)
            self._on_fault(framework, error)
            self._effects[framework] = tuple(effects)
            self._expect(set(), effects)
            self._sites.reach_copies()

    def catch_up(self) -> None:
        """Wait for target modules that other threads are importing, and patch these modules.

        Symbols that another tool has replaced become faults.

        ``Watcher`` misses imports that began before the ``Watcher`` was in place. The caller must
        hold no lock that a module's code may need.
        """
        with _lock:
            for framework, added in self._added.items():
                gone = [one.target for one in self.report(framework) if one.reason == _REPLACED]
                if gone:
                    where = f"{self._describe(added.adapter)}: {', '.join(dict.fromkeys(gone))}"
                    error = SeamError(f"{where}: {_REPLACED}")
                    self._faults.setdefault(framework, []).append(error)
                    self._on_fault(framework, error)
            slow = [
                row.seam.module
                for added in self._added.values()
                for row in added.rows
                if row.state == "pending" and row.seam.module in sys.modules
            ]
        for module in dict.fromkeys(slow):
            if is_cut_off(module):
                continue
            with suppress(Exception):  # the thread that imports the module gets the error
                __import__(module)
            with _lock:
                if self._live and _is_loaded(module):
                    self._on_arrival(module)
                    self._sites.reach_copies()

    def _expect(self, modules: set[str], effects: Iterable[str]) -> None:
        if self._strict:
            modules = modules | {target.partition(":")[0] for target in effects}
        self._watcher.watch(modules)
        for module in modules:
            if _is_loaded(module):
                self._on_arrival(module)

    def _on_import(self, module: str) -> None:
        with _lock:
            if self._live:
                _lock.patched = getattr(sys.modules.get(module), "__spec__", None), get_ident()
                self._forget(module)
                self._on_arrival(module)
                self._sites.reach_copies()

    def _forget(self, module: str) -> None:
        """Reset a module's patched seams after a second run of its code overwrote the patches."""
        self._sites.forget(module)
        for added in self._added.values():
            for row in added.rows:
                placed = row.state == "wrapped" or (row.seam.refusal and row.state == "refused")
                if placed and row.seam.module == module and row.group not in self._refused:
                    row.state = "pending"

    def _on_arrival(self, module: str) -> None:
        done: set[str] = set()
        while True:
            self._trip(module)  # first, because its functions raise any error of patching
            # Patching may import a framework and so add an adapter: search ``_known`` again.
            framework = next((name for name in self._added if name not in done), None)
            if framework is None:
                return
            done.add(framework)
            self._on_arrival_in(framework, module)

    def _on_arrival_in(self, framework: str, module: str) -> None:
        added = self._added[framework]
        if not added.checked and any(
            row.seam.module == module and row.state != "off" for row in added.rows
        ):
            added.checked = True
            had = self._missed(added.adapter)
            plan = check(added.adapter, self._features, self._settings, had, self._proved())
            added.rows = plan.rows
            for group, problems in plan.refused.items():
                self._refuse(group, problems)
        # Not only this module's: the watcher misses imports that began before it started.
        for row in added.rows if added.checked else ():
            if (
                self._live
                and row.state == "pending"
                and row.group not in self._refused
                and (row.seam.module == module or _is_loaded(row.seam.module))
            ):
                self._apply(row, added.adapter)

    def _refuse(self, group: Group, problems: Iterable[str]) -> None:
        if group in self._refused or not self._live:
            return
        self._refused.add(group)
        self._sites.take_out(group)
        framework, feature, name = group
        added, problems = self._added[framework], tuple(problems)
        for row in added.rows:
            if row.group == group and row.state in ("pending", "wrapped"):
                refuse(row, problems)
        error = SeamError(
            f"{self._describe(added.adapter)}: {feature}{f', group {name!r},' if name else ''} is "
            f"refused whole: {'; '.join(problems)}. Tested versions: "
            f"{', '.join(added.adapter.tested)}. Install one of these, or leave the feature out "
            f"with PRECISION_SHIM_FEATURES=-{feature}."
        )
        self._faults.setdefault(framework, []).append(error)
        self._on_fault(framework, error)

    def _apply(self, row: Row, adapter: Adapter) -> None:
        seam = row.seam
        try:
            parent, _, raw = locate(seam.target)
            function = _bind(seam, raw, inspect.isclass(parent), row.symbol)
            site = self._sites.at(seam.target)
            owner = f"precision_shim:{adapter.framework}"
            self._sites.put(site, Layer(seam.key, function, owner, {row.group}, seam.replaces))
        except Exception as error:  # a broken adapter must not break the framework's import
            self._refuse(row.group, [f"{seam.target}: {error}"])
            return
        if not self._live:  # put() forked, and this child undid the patches
            return
        unreached = self._sites.reach(site, seam.aliases)
        # A seam with ``refusal`` is patched too: its wrapper reports why the feature is impossible.
        row.state = "refused" if seam.refusal else "wrapped"
        row.reason = seam.refusal
        if unreached:
            row.reason = f"not reached, holds something else: {', '.join(unreached)}"

    def _trip(self, module: str) -> None:
        """In strict mode, make functions listed in ``effects`` raise the adapter's first error."""
        for framework, effects in self._effects.items() if self._strict else ():
            for target in effects:
                if target.partition(":")[0] != module:
                    continue
                try:
                    site = self._sites.at(target)
                except Exception:  # this version lacks the symbol
                    continue
                key = f"fault:{framework}"
                if site.layer(key) is None:
                    owner, group = f"precision_shim:{framework}", (framework, "strict", target)
                    self._sites.put(
                        site, Layer(key, self._raise_fault_of(framework), owner, {group})
                    )

    def _raise_fault_of(self, framework: str) -> Callable[..., Any]:
        def trip(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            faults = self._faults.get(framework)
            if faults:
                raise faults[0]
            return wrapped(*args, **kwargs)

        return trip

    def remove(self) -> list[str]:
        """Undo all patches, the latest first.

        Returns:
            A message for each symbol that cannot be restored because another tool has wrapped our
            wrapper. Our wrapper remains, and only calls the original symbol.
        """
        with _lock:
            self._live = False
            self._watcher.remove()
            left = self._sites.remove()
            self._effects.clear()
            self._added.clear()
            self._faults.clear()
            self._refused.clear()
            return left

    def report(self, framework: str) -> tuple[SeamStatus, ...]:
        """Return the states of a framework's seams, in the order of its adapter's table."""
        with _lock:
            added = self._added.get(framework)
            if added is None:
                return ()
            replaced = self._sites.replaced()
            return tuple(
                replace(row, state="refused", reason=_REPLACED).status(added.adapter)
                if row.state == "wrapped" and row.seam.target in replaced
                else row.status(added.adapter)
                for row in added.rows
            )

    def faults(self, framework: str) -> tuple[PrecisionShimError, ...]:
        """Return the errors of a framework's refused groups of seams, oldest first."""
        with _lock:
            return tuple(self._faults.get(framework, ()))

    def is_refused(self, framework: str, feature: str, group: str) -> bool:
        """Whether a feature's group of seams was refused for a framework."""
        with _lock:
            return (framework, feature, group) in self._refused


def _is_loaded(module: str) -> bool:
    """Whether a module is imported and its code has run; the watcher reports its end."""
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None)
    return loaded is not None and not getattr(spec, "_initializing", False)


def _bind(seam: Seam, raw: Any, in_class: bool, symbol: Symbol) -> Callable[..., Any]:
    """Return the seam's wrapper in wrapt's form, matched to the imported symbol's parameters."""
    assert seam.wrapper is not None  # After check(), every pending seam has a wrapper.
    if seam.replaces:  # The symbol's value may be an object that is not callable
        return seam.wrapper
    function = getattr(raw, "__func__", raw)
    if not callable(function):
        raise SeamError(f"{seam.target} is not callable: {function!r}")
    return through(seam.wrapper, prepare(seam.wrapper, seam.target, raw, in_class, symbol))
