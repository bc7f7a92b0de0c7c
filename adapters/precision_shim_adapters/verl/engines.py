"""Engines of verl that a feature does not reach: said by name where they are used."""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import current_settings, decide, version_of, warn
from precision_shim.errors import UnsupportedPrecisionError


def refuse(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Warn (strict: raise) that the shim does nothing for this engine, and run it as it is."""
    from . import ADAPTER

    kinds = {one.__name__ for one in type(instance).__mro__}
    reasons = {
        seam.refusal: seam.feature
        for seam in ADAPTER.seams
        if seam.refusal
        and seam.attribute.split(".")[0] in kinds
        and seam.feature in current_settings().features
    }
    for reason, feature in reasons.items():
        message = (
            f"verl {version_of('verl', ('verl',))}: {reason}; the shim leaves it as it is. Set "
            "the dtypes in the engine's own config, or use the megatron engine."
        )
        if current_settings().strict:
            raise UnsupportedPrecisionError(message)
        decide("verl", type(instance).__name__, feature, "left as it is", reason)
        warn(message)
    return wrapped(*args, **kwargs)
