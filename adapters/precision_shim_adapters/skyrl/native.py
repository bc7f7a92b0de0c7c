"""What SkyRL does itself in some versions, read from its source: a seam's ``native`` probe.

This module imports no torch, so that ``precision-shim doctor`` need not.
"""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Symbol


def native_coercion(symbol: Symbol, settings: Any) -> str | None:
    """Return a reason to skip the seam if SkyRL itself converts dtype names (since 0.3)."""
    if "coerce_optimizer_dtype_kwargs" in symbol.names:
        return (
            "SkyRL coerces optimizer_config_kwargs; what the installed TransformerEngine rules out "
            "is refused at Megatron's OptimizerConfig"
        )
    return None
