"""Catch the shim's warnings."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from precision_shim.errors import PrecisionShimWarning


@contextlib.contextmanager
def ours(said: list[str] | None = None) -> Iterator[list[str]]:
    """Add the shim's warnings during a block to a list, also if the block raises an error."""
    said = [] if said is None else said
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield said
        finally:
            mine = (one for one in caught if issubclass(one.category, PrecisionShimWarning))
            said += [str(one.message) for one in mine]


def watched(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Call a function; returns its result and the shim's warnings during the call."""
    with ours() as said:
        found = act()
    return found, said
