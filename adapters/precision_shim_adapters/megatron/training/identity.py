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
        key = id(thing)

        def forget(gone: weakref.ref[Any]) -> None:
            if key in self._kept and self._kept[key][0] is gone:
                del self._kept[key]

        self._kept[key] = weakref.ref(thing, forget), value

    def get(self, thing: Any) -> Value | None:
        """The value of an object; ``None`` if it has none."""
        reference, value = self._kept.get(id(thing), (None, None))
        return value if reference is not None and reference() is thing else None
