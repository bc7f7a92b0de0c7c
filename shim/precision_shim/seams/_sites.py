"""The places that are patched, the layers over them, and the way back."""

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
    """What stands over a symbol, and the groups that need it; with none it is dead.

    Attributes:
        key: tells layers of one site apart: the wrapper, however many features need it.
        function: in wrapt's form; of a replacement, what makes it.
        owner: marks the wrapped symbol as ours and names the adapter.
        groups: who needs it.
        replaces: whether ``function`` makes what is to stand there.
        made: what a replacement replaced, and by what: it is made once.
    """

    key: object
    function: Callable[..., Any]
    owner: str
    groups: set[Group]
    replaces: bool = False
    made: tuple[Any, Any] | None = None

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
class Site:
    """One patched symbol: what was there, the layers over it (innermost first), what is there."""

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
        """What stood at a site and has been replaced since, by id."""

    def at(self, target: str) -> Site:
        """The place where a target is patched; a new one when another tool has wrapped ours."""
        parent, name, raw = locate(target)
        for site in self._sites:
            if site.parent is parent and site.name == name and site.holds():
                return site
        site = Site(target, parent, name, raw, getattr(parent, name), top=raw)
        self._sites.append(site)
        return site

    def put(self, site: Site, new: Layer) -> None:
        """Put a layer over all that is there; of one that is there already only the groups grow."""
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
        """A module's code has run: what was patched there before, if it was, is no more."""
        for site in self._sites:
            if site.target.partition(":")[0] == module and not site.holds():
                site.stale = True

    def remove(self) -> list[str]:
        """Undo everything, newest first.

        Returns:
            What could not be restored because another tool has wrapped it since; our wrapper is
            left beneath the other one and passes every call through.
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
            for names, name in map(_named, site.aliases):
                if names.get(name) is site.top:
                    names[name] = site.original
            site.layers.clear()
            self._displaced[id(site.top)] = site.top, site
            site.top = None
        self.reach_copies()
        self._sites.clear()
        return left

    def _rebuild(self, site: Site) -> None:
        """Put a site's layers in place anew, also where modules hold what we had put there."""
        if not site.holds():
            return
        before, top = site.top, site.raw
        for layer in site.layers:
            top = layer.over(top, site.target)
        if site.top is not before:  # what makes a replacement has forked, and this is the child
            return
        if top is not before:
            setattr(site.parent, site.name, top)
            site.top = top
        if before is not site.raw:
            self._displaced[id(before)] = before, site
        if not site.layers:
            self._sites.remove(site)

    def reach(self, site: Site, aliases: Iterable[str]) -> list[str]:
        """Give declared aliases what the symbol now is; returns those that hold something else."""
        unreached = []
        for alias in aliases:
            site.aliases.add(alias)
            names, attribute = _named(alias)
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
        """Give modules that hold by value what stood at a site what stands there now.

        Once for all sites that have changed: it looks at every name of every module. What nobody
        holds is not looked for.
        """
        gone = {key: self._displaced[key] for key in _held(self._displaced)}
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


def _held(displaced: Mapping[int, tuple[Any, Any]]) -> list[int]:
    """Which of these objects someone holds beside the tuples in which they stand first.

    Nearly always it is none, and then there is nothing to look for.
    """
    pairs: list[tuple[Any, Any]] = [(object(), None), *displaced.values()]
    # The first is held by its tuple alone, however this interpreter counts.
    alone, *counts = [sys.getrefcount(pair[0]) for pair in pairs]
    return [key for key, count in zip(displaced, counts, strict=True) if count > alone]


def _sweep(gone: Mapping[int, tuple[Any, Any]]) -> None:
    """Give modules that hold what we had put somewhere by value what it was replaced by."""
    for module in list(sys.modules.values()):
        names = _contents(module)
        # Some 200,000 names and hardly ever a hit: 20 times faster than the loop below.
        if gone.keys().isdisjoint(map(id, list(names.values()))):
            continue
        for name, value in list(names.items()):
            if id(value) in gone and gone[id(value)][0] is value:
                names[name] = gone[id(value)][1]


def _named(alias: str) -> tuple[dict[str, Any], str]:
    """The names of an alias's module, none if it is not imported, and the alias's own."""
    module, _, name = alias.partition(":")
    return _contents(sys.modules.get(module)), name


def _contents(module: Any) -> dict[str, Any]:
    """A module's names; ``vars()`` and ``getattr`` would make a lazy module load itself."""
    try:
        names = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return names if isinstance(names, dict) else {}
