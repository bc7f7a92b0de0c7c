"""Values for objects without a hash, such as an OptimizerConfig or a DDP's config."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """Maps live objects to values, by the objects' identity; it refers to the objects weakly."""

    def __init__(self) -> None:
        """Make an empty map."""
        self._kept: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def __setitem__(self, thing: Any, value: Value) -> None:
        """Map an object to a value, for as long as the object exists."""
        self._kept = {key: kept for key, kept in self._kept.items() if kept[0]() is not None}
        self._kept[id(thing)] = weakref.ref(thing), value

    def clear(self) -> None:
        """Forget all objects."""
        self._kept.clear()

    def get(self, thing: Any) -> Value | None:
        """The value of an object; ``None`` if it has none."""
        kept = self._kept.get(id(thing))
        return kept[1] if kept is not None and kept[0]() is thing else None
