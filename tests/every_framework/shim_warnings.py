"""Catch the shim's warnings during a call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from precision_shim.errors import PrecisionShimWarning


def watched(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Call a function; returns its result and the shim's warnings during the call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = act()
    ours = (one for one in caught if issubclass(one.category, PrecisionShimWarning))
    return found, [str(one.message) for one in ours]
