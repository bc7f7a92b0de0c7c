"""A loss scaler's settings from framework config, ``PRECISION_SHIM_*`` settings and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precision_shim.adapting import Settings, current_settings
from precision_shim.scaling.record import ScalerSettings, in_words

FEATURE = "fp16-scaling"

SETTINGS = {
    "init_scale": "loss_scale_init",
    "growth_interval": "growth_interval",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
}
"""Maps the fields of ``ScalerSettings`` to the names of the shim's settings."""


def settings_for(
    configured: Mapping[str, Any] | None = None,
    framework_default: ScalerSettings | None = None,
    shim: Settings | None = None,
) -> ScalerSettings:
    """Merge the user's config, ``PRECISION_SHIM_*`` settings and the framework's defaults.

    Args:
        configured: values of the user's config, by names of ``ScalerSettings``; they come first.
        framework_default: of the framework's scaler; ``None`` for the shim's defaults.
        shim: the shim's settings; ``None`` for the settings in force.
    """
    shim = current_settings() if shim is None else shim
    values: dict[str, Any] = {}
    chosen: set[str] = set()
    for name, variable in SETTINGS.items():
        value = configured.get(name) if configured is not None else None
        if value is not None or shim.is_set(variable):
            chosen.add(name)
        elif framework_default is not None:
            value = getattr(framework_default, name)
        values[name] = shim[variable] if value is None else value
    # The user may set an initial loss scale below the default minimum: lower the minimum, too.
    least = min(ScalerSettings.min_scale, values["init_scale"])
    return ScalerSettings(**values, min_scale=least, chosen=frozenset(chosen))


def chosen(settings: ScalerSettings) -> str:
    """The text of the decision about the shim's scaler."""
    return "loss scaling " + in_words(
        settings.init_scale,
        settings.growth_factor,
        settings.growth_interval,
        settings.backoff_factor,
    )
