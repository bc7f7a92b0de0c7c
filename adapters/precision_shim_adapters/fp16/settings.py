"""What a scaler is made with: the framework's config, the variables, the framework's own values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precision_shim.adapting import Settings, current_settings
from precision_shim.scaling import ScalerSettings

SETTINGS = {
    "init_scale": "loss_scale_init",
    "growth_interval": "growth_interval",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
}
"""Names of ``ScalerSettings``, to the names of the shim's settings."""


def settings_for(
    configured: Mapping[str, Any] | None = None,
    framework_default: ScalerSettings | None = None,
    shim: Settings | None = None,
) -> ScalerSettings:
    """Bring together what the user wrote, the variables and the framework's own values.

    Args:
        configured: what the user wrote in the framework's config, by the names of
            ``ScalerSettings``; it wins over variables.
        framework_default: what the framework's own scaler has; ``None`` where the scaler is the
            shim's alone, whose defaults are those of the variables.
        shim: the shim's settings; ``None`` for those in force.
    """
    shim = current_settings() if shim is None else shim
    values: dict[str, Any] = {}
    chosen: set[str] = set()
    for name, variable in SETTINGS.items():
        if configured is not None and configured.get(name) is not None:
            values[name] = configured[name]
            chosen.add(name)
        elif shim.is_set(variable):
            values[name] = shim[variable]
            chosen.add(name)
        elif framework_default is not None:
            values[name] = getattr(framework_default, name)
        else:
            values[name] = shim[variable]
    # Only the user sets a first scale below the usual minimum: make it the minimum.
    least = min(ScalerSettings.min_scale, values["init_scale"])
    return ScalerSettings(**values, min_scale=least, chosen=frozenset(chosen))


def in_words(
    init_scale: float, growth_factor: float, growth_interval: float, backoff_factor: float
) -> str:
    """What a scaler does, as a decision says it."""
    return (
        f"from {init_scale:g}, growth x{growth_factor:g} after {growth_interval:g} steps, "
        f"backoff x{backoff_factor:g}"
    )


def chosen(settings: ScalerSettings) -> str:
    """What the shim's own scaler is made with, as a decision says it."""
    return "loss scaling " + in_words(
        settings.init_scale,
        settings.growth_factor,
        settings.growth_interval,
        settings.backoff_factor,
    )
