"""Wrap functions of modules that are imported, or will be, during one ``install()``.

A framework's symbols are wrapped by seams; these are functions of torch and of Ray, which tell how
a job's processes fit together.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import Any

from .finders import Watcher


class Wrapping:
    """Functions that are wrapped from ``enter()`` until ``leave()``; imports nothing."""

    def __init__(
        self, places: Collection[str], wrapper: Callable[[str, Any], Callable[..., Any]]
    ) -> None:
        """Name the functions.

        Args:
            places: ``"module:name"`` or ``"module:Class.name"`` of each function; a place that has
                a copy of an earlier place's function gets the same wrapper.
            wrapper: takes a function's place and the function; returns what replaces the function.
        """
        self._places = places
        self._wrapper = wrapper
        self._watcher = Watcher(self._wrap)
        self._wrapped: list[tuple[Any, str, Any, Any]] = []

    @property
    def on(self) -> bool:
        """Whether a function is wrapped: a wrapper that outlives ``leave()`` must do nothing."""
        return bool(self._wrapped)

    def enter(self) -> None:
        """Wrap the functions, now or when their modules are imported."""
        modules = dict.fromkeys(place.partition(":")[0] for place in self._places)
        self._watcher.watch(modules)
        for name in modules:
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                self._wrap(name)

    def leave(self) -> None:
        """Restore the functions."""
        self._watcher.remove()
        for owner, name, original, ours in self._wrapped:
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
        self._wrapped.clear()

    def _wrap(self, module: str) -> None:
        for place in self._places:
            where, _, path = place.partition(":")
            if where != module:
                continue
            above, _, name = path.rpartition(".")
            owner: Any = sys.modules[module]
            owner = getattr(owner, above, None) if above else owner
            original = getattr(owner, name, None)
            again = any(one[:2] == (owner, name) for one in self._wrapped)
            if original is None or again:
                continue
            pairs = (one[2:] for one in self._wrapped if any(original is both for both in one[2:]))
            pair = next(pairs, None)  # of a function of which this place has a copy
            ours = pair[1] if pair else functools.wraps(original)(self._wrapper(place, original))
            self._wrapped.append((owner, name, pair[0] if pair else original, ours))
            setattr(owner, name, ours)
