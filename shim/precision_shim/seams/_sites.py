"""Store each patched symbol with its wrappers, and undo the patches."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import SeamError
from ._plan import Group
from ._wrapper import SeamWrapper

_ABSENT = object()


@dataclass
class Layer:
    """A wrapper of a symbol; the wrapper does nothing unless a group of seams needs it.

    Attributes:
        key: identifies the wrapper among a symbol's wrappers; features may share a wrapper.
        function: the wrapper in wrapt's form; with ``replaces``, makes the symbol's replacement.
        owner: marks the wrapped symbol as ours and names the adapter.
        groups: the groups of seams that need the wrapper.
        made: the replaced value and its replacement, which is made only once.
    """

    key: object
    function: Callable[..., Any]
    owner: str
    groups: set[Group]
    replaces: bool = False
    made: tuple[Any, Any] | None = None

    def is_live(self) -> bool:
        """Whether a group needs the wrapper; tested at each call: callers may store wrappers."""
        return bool(self.groups)

    def over(self, below: Any, target: str) -> Any:
        """Return ``below``, the symbol or an inner wrapper, wrapped or replaced."""
        if not self.replaces:
            return SeamWrapper(
                below, self.function, target=target, owner=self.owner, enabled=self.is_live
            )
        if self.made is None or self.made[0] is not below:
            self.made = below, self.function(below)
        return self.made[1]


@dataclass(eq=False)
class Site:
    """A patched symbol with its original value, wrappers (innermost first) and current value."""

    target: str
    parent: Any
    name: str
    raw: Any
    original: Any
    layers: list[Layer] = field(default_factory=list)
    top: Any = None
    stale: bool = False  # the module's code ran again and assigned a new value to the symbol
    aliases: set[str] = field(default_factory=set)

    def holds(self) -> bool:
        """Whether the symbol still has the value that the shim assigned to it."""
        return vars(self.parent).get(self.name) is self.top

    def is_reached(self) -> bool:
        """Whether calls still come to our wrapper, as far as ``__wrapped__`` and bases show."""

        def ours(value: Any) -> bool:
            bound_to = getattr(value, "_self_parent", None)
            return self.top in (value, bound_to, *getattr(value, "__mro__", ()))

        try:
            value = locate(self.target)[2]
        except (AttributeError, KeyError, SeamError):  # the module or a class is gone
            return self.holds()
        try:
            return ours(inspect.unwrap(value, stop=ours))
        except ValueError:  # it wraps itself
            return False

    def layer(self, key: object) -> Layer | None:
        """Return the symbol's wrapper with this key, or ``None``."""
        return next((layer for layer in self.layers if layer.key == key), None)


class Sites:
    """All symbols that an engine has patched. Callers must hold the lock of the seam engine."""

    def __init__(self) -> None:
        self._sites: list[Site] = []
        self._displaced: dict[int, tuple[Any, Site]] = {}
        """Maps the ``id`` of a symbol's earlier value to this value and the symbol's ``Site``."""

    def at(self, target: str) -> Site:
        """Return a symbol's ``Site``; make a new one if another tool has wrapped our wrapper."""
        parent, name, raw = locate(target)
        for site in self._sites:
            if site.parent is parent and site.name == name and site.holds():
                return site
        site = Site(target, parent, name, raw, getattr(parent, name), top=raw)
        self._sites.append(site)
        return site

    def put(self, site: Site, new: Layer) -> None:
        """Add an outermost wrapper, or add its groups to the symbol's wrapper of the same key."""
        layer = site.layer(new.key)
        if layer is not None:
            layer.groups |= new.groups
        else:
            site.layers.append(new)
            self._rebuild(site)

    def take_out(self, group: Group) -> None:
        """Remove a group's wrappers, except wrappers that another group needs."""
        for site in list(self._sites):
            for layer in list(site.layers):
                layer.groups.discard(group)
                if not layer.groups:
                    site.layers.remove(layer)
                    self._rebuild(site)

    def forget(self, module: str) -> None:
        """Mark symbols as stale if their module's code ran again and overwrote our patches."""
        for site in self._sites:
            if site.target.partition(":")[0] == module and not site.holds():
                site.stale = True

    def replaced(self) -> set[str]:
        """Return the targets whose wrapper another tool has replaced."""
        held = {site.target for site in self._sites if site.is_reached()}
        return {site.target for site in self._sites if not site.stale} - held

    def remove(self) -> list[str]:
        """Undo all patches, the latest first; see ``SeamEngine.remove``."""
        left = []
        for site in reversed(self._sites):
            for layer in site.layers:
                layer.groups.clear()
                layer.made = None
            if site.holds():
                setattr(site.parent, site.name, site.raw)
            elif not site.stale:
                left.append(f"{site.target} was changed by someone else since and is left as it is")
            for names, name in map(_resolve_alias, site.aliases):
                if names.get(name) is site.top:
                    names[name] = site.original
            site.layers.clear()
            self._displaced[id(site.top)] = site.top, site
            site.top = None
        self.reach_copies()
        self._sites.clear()
        return left

    def _rebuild(self, site: Site) -> None:
        """Wrap a symbol's original value in the wrappers anew; ``reach_copies`` updates copies."""
        if not site.holds():
            return
        before, top = site.top, site.raw
        for layer in site.layers:
            top = layer.over(top, site.target)
        if site.top is not before:  # over() forked, and this child undid the patches
            return
        if top is not before:
            setattr(site.parent, site.name, top)
            site.top = top
        if before is not site.raw:
            self._displaced[id(before)] = before, site
        if not site.layers:
            self._sites.remove(site)

    def reach(self, site: Site, aliases: Iterable[str]) -> list[str]:
        """Set declared aliases to the symbol's value; return aliases that another tool changed."""
        unreached = []
        for alias in aliases:
            site.aliases.add(alias)
            names, attribute = _resolve_alias(alias)
            if attribute not in names or names[attribute] is site.top:
                continue
            _, held = self._displaced.get(id(names[attribute]), (None, None))
            ours = held is not None and held.parent is site.parent and held.name == site.name
            if names[attribute] is site.original or ours:
                names[attribute] = site.top
            else:
                unreached.append(alias)
        return unreached

    def reach_copies(self) -> None:
        """Replace old values of symbols in modules that copied them (``from ... import``).

        Call this once for all changed symbols, because it reads every name of every module.
        """
        gone = {key: self._displaced[key] for key in _find_held(self._displaced)}
        if gone:
            _sweep(
                {
                    key: (before, site.top if site.layers else site.original)
                    for key, (before, site) in gone.items()
                }
            )
        self._displaced.clear()


def locate(target: str) -> tuple[Any, str, Any]:
    """Return a symbol's parent object, and the symbol's name and raw value in this parent."""
    module, _, attribute = target.partition(":")
    parent: Any = sys.modules[module]
    *path, name = attribute.split(".")
    for part in path:
        parent = getattr(parent, part)
    raw = vars(parent).get(name, _ABSENT)
    if raw is _ABSENT:
        raise SeamError(f"{target} not found in the imported module")
    return parent, name, raw


def _find_held(displaced: Mapping[int, tuple[Any, Any]]) -> list[int]:
    """Return ids of displaced objects in use elsewhere; mostly none, which saves a slow search."""
    pairs: list[tuple[Any, Any]] = [(object(), None), *displaced.values()]
    # A reference count above that of the new ``object()`` means that other code has the object.
    alone, *counts = [sys.getrefcount(pair[0]) for pair in pairs]
    return [key for key, count in zip(displaced, counts, strict=True) if count > alone]


def _sweep(gone: Mapping[int, tuple[Any, Any]]) -> None:
    """Replace each old value in ``gone`` by its new value, in all modules."""
    kinds = {type(before) for before, _ in gone.values()}
    for module in list(sys.modules.values()):
        names = _contents(module)  # another thread may add names: read copies
        # Most modules contain no value of these types, and comparing types is the fastest check.
        if kinds.isdisjoint(map(type, list(names.values()))):
            continue
        for name, value in list(names.items()):
            if id(value) in gone and gone[id(value)][0] is value:
                names[name] = gone[id(value)][1]


def _resolve_alias(alias: str) -> tuple[dict[str, Any], str]:
    """Return the namespace of an alias's module (empty if not imported), and the alias's name."""
    module, _, name = alias.partition(":")
    return _contents(sys.modules.get(module)), name


def _contents(module: Any) -> dict[str, Any]:
    """Return a module's namespace; ``vars()`` and ``getattr`` would load a lazy module."""
    try:
        names = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return names if isinstance(names, dict) else {}
