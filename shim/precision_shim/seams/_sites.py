"""The patched symbols, the layers over each of them, and how to undo them."""

from __future__ import annotations

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
    """One wrapper over a symbol, and the groups that need it; without groups it is dead.

    Attributes:
        key: tells the layers of one site apart: the wrapper, which several features may share.
        function: the wrapper in wrapt's form; for a replacement, the function that makes it.
        owner: marks the wrapped symbol as ours and names the adapter.
        groups: the groups that need the layer.
        replaces: whether ``function`` makes a replacement for the symbol.
        made: the replaced value and its replacement, which is made once.
    """

    key: object
    function: Callable[..., Any]
    owner: str
    groups: set[Group]
    replaces: bool = False
    made: tuple[Any, Any] | None = None

    def is_live(self) -> bool:
        """Whether a group needs the layer. Each call asks: someone may have kept a dead wrapper."""
        return bool(self.groups)

    def over(self, below: Any, target: str) -> Any:
        """Wrap or replace the value ``below``; a replacement is made once."""
        if not self.replaces:
            return SeamWrapper(
                below, self.function, target=target, owner=self.owner, enabled=self.is_live
            )
        if self.made is None or self.made[0] is not below:
            self.made = below, self.function(below)
        return self.made[1]


@dataclass
class Site:
    """One patched symbol: its original value, the layers (innermost first), and its value now."""

    target: str
    parent: Any
    name: str
    raw: Any
    original: Any
    layers: list[Layer] = field(default_factory=list)
    top: Any = None
    stale: bool = False  # the module's code ran again and put something new there
    aliases: set[str] = field(default_factory=set)

    def holds(self) -> bool:
        """Whether the symbol is still what the engine put there."""
        return vars(self.parent).get(self.name) is self.top

    def layer(self, key: object) -> Layer | None:
        """The layer of that key, if there is one."""
        return next((one for one in self.layers if one.key == key), None)


class Sites:
    """All places that an engine has patched. The engine's lock guards them."""

    def __init__(self) -> None:
        """Make a record in which nothing is patched."""
        self._sites: list[Site] = []
        self._displaced: dict[int, tuple[Any, Site]] = {}
        """Former values of sites, by id, each with its site."""

    def at(self, target: str) -> Site:
        """The site of a target; a new site if another tool has wrapped our wrapper."""
        parent, name, raw = locate(target)
        for site in self._sites:
            if site.parent is parent and site.name == name and site.holds():
                return site
        site = Site(target, parent, name, raw, getattr(parent, name), top=raw)
        self._sites.append(site)
        return site

    def put(self, site: Site, new: Layer) -> None:
        """Put a layer outermost on a site; if the site has the layer, only add the groups."""
        layer = site.layer(new.key)
        if layer is not None:
            layer.groups |= new.groups
        else:
            site.layers.append(new)
            self._rebuild(site)

    def take_out(self, group: Group) -> None:
        """Take out the layers that no other group needs."""
        for site in list(self._sites):
            for layer in list(site.layers):
                layer.groups.discard(group)
                if not layer.groups:
                    site.layers.remove(layer)
                    self._rebuild(site)

    def forget(self, module: str) -> None:
        """A module's code has run, perhaps again: earlier patches in the module are gone."""
        for site in self._sites:
            if site.target.partition(":")[0] == module and not site.holds():
                site.stale = True

    def remove(self) -> list[str]:
        """Undo everything, newest first.

        Returns:
            A message for each symbol that cannot be restored because another tool has wrapped it
            since; our wrapper stays beneath that tool's and passes every call through.
        """
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
        """Rebuild a site's layers over its original value; ``reach_copies`` then updates copies."""
        if not site.holds():
            return
        before, top = site.top, site.raw
        for layer in site.layers:
            top = layer.over(top, site.target)
        if site.top is not before:  # the child of a fork in the function that makes a replacement
            return
        if top is not before:
            setattr(site.parent, site.name, top)
            site.top = top
        if before is not site.raw:
            self._displaced[id(before)] = before, site
        if not site.layers:
            self._sites.remove(site)

    def reach(self, site: Site, aliases: Iterable[str]) -> list[str]:
        """Set declared aliases to the symbol's value; returns those that another tool changed."""
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
        """Give modules that copied a symbol's old value (``from ... import``) the current value.

        Call it once for all changed sites: it goes through every name of every module. It skips
        old values that nobody holds any more.
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


def _find_held(displaced: Mapping[int, tuple[Any, Any]]) -> list[int]:
    """The ids of those objects that something besides these tuples holds.

    Nearly always there are none, and no search is needed.
    """
    pairs: list[tuple[Any, Any]] = [(object(), None), *displaced.values()]
    # Only its tuple holds the first object, so its count is the one to compare with.
    alone, *counts = [sys.getrefcount(pair[0]) for pair in pairs]
    return [key for key, count in zip(displaced, counts, strict=True) if count > alone]


def _sweep(gone: Mapping[int, tuple[Any, Any]]) -> None:
    """Replace former values by their successors in all modules that copied them."""
    for module in list(sys.modules.values()):
        names = _contents(module)
        # Of some 200,000 names hardly one is a hit; this test is 20 times faster than the loop.
        if gone.keys().isdisjoint(map(id, list(names.values()))):
            continue
        for name, value in list(names.items()):
            if id(value) in gone and gone[id(value)][0] is value:
                names[name] = gone[id(value)][1]


def _resolve_alias(alias: str) -> tuple[dict[str, Any], str]:
    """The namespace of an alias's module (empty if not imported), and the alias's own name."""
    module, _, name = alias.partition(":")
    return _contents(sys.modules.get(module)), name


def _contents(module: Any) -> dict[str, Any]:
    """A module's names; ``vars()`` and ``getattr`` would make a lazy module load itself."""
    try:
        names = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return names if isinstance(names, dict) else {}
