"""The settings of Megatron's dynamic loss scaler, for the worker and for the command ``plan``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from precision_shim.adapting import Settings, parse_settings
from precision_shim.errors import SettingsError
from precision_shim.precision.dtypes import name_of
from precision_shim.scaling.record import in_words

from .optimizer_plan import scaler_row
from .requested import RequestedConfig

FIELDS = {"loss_scale_init": "initial_loss_scale", "growth_interval": "loss_scale_window"}
"""Maps the shim's settings to the fields of Megatron's OptimizerConfig."""

FACTORS = ("growth_factor", "backoff_factor")
"""Settings of the shim that are no fields of a config, but arguments of Megatron's scaler."""

_OWN = {
    "initial_loss_scale": 2.0**32,
    "min_loss_scale": 1.0,
    "loss_scale_window": 1000.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
}
"""Values that megatron-core 0.16 to 0.19 has in OptimizerConfig or passes to DynamicGradScaler."""


def scaler_fields(
    requested: RequestedConfig, asked: Mapping[str, Any], settings: Settings
) -> dict[str, Any]:
    """Choose values for loss scaler fields that the user did not write in the OptimizerConfig.

    The framework's config overrides settings of ``install()`` and of environment variables.

    Raises:
        SettingsError: the initial loss scale is below the minimum.
    """
    block = parse_settings(requested.scaler, FIELDS, requested.scaler_where)
    fields = scaler_row()
    for name, field in FIELDS.items():
        if name in block or settings.is_set(name):
            fields[field] = block.get(name, settings[name])
    fields = {key: value for key, value in fields.items() if key not in asked}
    place, key, way = requested.where, "initial_loss_scale", "Write a higher one"
    if "loss_scale_init" in block:
        place, key, way = requested.scaler_where, "loss_scale_init", "Raise it"
    elif settings.is_set("loss_scale_init"):
        key, way = "PRECISION_SHIM_LOSS_SCALE_INIT", "Raise it"
    refuse_low({**asked, **fields}, place, key, way)
    return fields


def refuse_low(
    fields: Mapping[str, Any],
    where: str,
    key: str = "initial_loss_scale",
    way: str = "Write a higher one",
) -> None:
    """Refuse a dynamic loss scaler that begins below its minimum, a bare assertion in Megatron.

    ``where`` and ``key`` are for the message, ``way`` is how to raise the initial loss scale.

    Raises:
        SettingsError: the initial loss scale is below the minimum.
    """
    own = {**_OWN, **fields}
    first, least = own["initial_loss_scale"], own["min_loss_scale"]
    if not fields.get("loss_scale") and least is not None and first < least:
        raise SettingsError(
            f"{where}: {key}={first:g} is below min_loss_scale={least:g} of Megatron's "
            f"OptimizerConfig. {way}, or lower min_loss_scale."
        )


def factors_set(settings: Settings) -> dict[str, float]:
    """The growth and backoff factors that the user set."""
    return {name: settings[name] for name in FACTORS if settings.is_set(name)}


def describe_scaler(
    first: float,
    interval: float,
    factors: Mapping[str, float],
    ours: Mapping[str, float],
    dtype: torch.dtype | None = None,
) -> tuple[str, str]:
    """The values of a dynamic loss scaler (``first`` is its initial scale), and why, in words.

    Of ``factors`` (growth, backoff), ``ours`` come from the shim. A ``dtype`` of ``None`` is fp16.
    """
    because = f"the model is {name_of(dtype or torch.float16)}"
    if dtype not in (None, torch.float16):
        because += ", but the OptimizerConfig has fp16=True"
    because += f"; {', '.join(ours)} by the shim's settings" if ours else ""
    words = in_words(first, factors["growth_factor"], interval, factors["backoff_factor"])
    return f"Megatron's dynamic loss scaler {words}", because


def unscaled(where: str, fp16: object, bf16: object) -> str:
    """The message about an fp16 model whose OptimizerConfig has ``fp16=False``."""
    return (
        f"{where}: fp16={fp16}, bf16={bf16}, but the model is fp16: Megatron scales no loss then, "
        "and small gradients are lost. Set fp16 to true and bf16 to false there."
    )


def predicted_scaler(
    requested: RequestedConfig, asked: Mapping[str, Any], settings: Settings
) -> tuple[str, str] | None:
    """Describe the loss scaler that a planned job will have; ``None`` if its scale is static.

    Raises:
        SettingsError: see ``scaler_fields``.
    """
    fields = {**asked, **scaler_fields(requested, asked, settings)}
    return predicted_own_scaler(fields, settings, torch.float16)


def predicted_own_scaler(
    fields: Mapping[str, Any], settings: Settings, dtype: torch.dtype
) -> tuple[str, str] | None:
    """Predict the decision about the loss scaler that Megatron makes if ``fp16`` is true.

    Values and reason in words; ``None`` for a static loss scale. Only for an fp16 model does the
    shim choose initial loss scale and growth interval.
    """
    if fields.get("loss_scale"):
        return None
    ours = factors_set(settings)
    own = {**_OWN, **fields, **ours}
    first, interval = float(own["initial_loss_scale"]), float(own["loss_scale_window"])
    return describe_scaler(first, interval, own, ours, dtype)
