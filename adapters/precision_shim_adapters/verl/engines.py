"""Engines of verl that a feature does not reach: said by name where they are used."""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import current_settings, decide, version_of, warn
from precision_shim.errors import UnsupportedPrecisionError

from ..loss_scaling import FEATURE
from .fsdp import asks_fp16


def refuse(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Warn (strict: raise) that the shim does nothing for this engine, and run it as it is."""
    from . import ADAPTER

    kinds = {one.__name__ for one in type(instance).__mro__}
    reasons = {
        seam.refusal: seam.feature
        for seam in ADAPTER.seams
        if seam.refusal
        and seam.feature != FEATURE
        and seam.attribute.split(".")[0] in kinds
        and seam.feature in current_settings().features
    }
    for reason, feature in reasons.items():
        message = (
            f"verl {version_of('verl', ('verl',))}: {reason}; the shim leaves it as it is. Set "
            "the dtypes in the engine's own config, or use the megatron engine."
        )
        _leave(instance, feature, reason, message)
    return wrapped(*args, **kwargs)


def refuse_fp16(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Say so (strict: raise) where such an engine is asked for float16; else take no notice."""
    from . import ADAPTER

    config = getattr(instance, "engine_config", None)
    if not asks_fp16(config) or getattr(config, "forward_only", False):
        return wrapped(*args, **kwargs)
    kinds = {one.__name__ for one in type(instance).__mro__}
    reason = next(
        seam.refusal
        for seam in ADAPTER.seams
        if seam.refusal and seam.feature == FEATURE and seam.attribute.split(".")[0] in kinds
    )
    message = (
        f"verl {version_of('verl', ('verl',))}: {reason}; the shim cannot scale its loss. Train "
        "in bfloat16, or in float16 with the fsdp2, fsdp or megatron engine."
    )
    _leave(instance, FEATURE, reason, message)
    return wrapped(*args, **kwargs)


def _leave(engine: Any, feature: str, reason: str, message: str) -> None:
    if current_settings().strict:
        raise UnsupportedPrecisionError(message)
    decide("verl", type(engine).__name__, feature, "left as it is", reason)
    warn(message)
