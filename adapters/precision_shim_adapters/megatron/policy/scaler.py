"""The settings of Megatron's dynamic loss scaler, for the worker and for the command ``plan``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from precision_shim.adapting import Settings, parse_settings
from precision_shim.errors import SettingsError
from precision_shim.precision.dtypes import name_of
from precision_shim.scaling.record import in_words

from .legality import FP16, SCALER, STATIC, check_numbers
from .optimizer_plan import OptimizerPlan, scaler_row
from .requested import InForce, RequestedConfig

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

NOT_SCALED = "no loss scaling", "the optimizer's config has fp16=False"
"""The decision about an fp16 model whose config says otherwise, and its reason."""


def with_scaler(
    plan: OptimizerPlan,
    requested: RequestedConfig,
    now: InForce,
    settings: Settings,
    dtype: torch.dtype | None,
) -> OptimizerPlan:
    """Check the scaler's fields, and choose those that the user of an fp16 model did not write.

    The framework's config overrides settings of ``install()`` and of environment variables.

    Raises:
        SettingsError: a value is no number, or the initial loss scale is below the minimum, which
            is a bare assertion in Megatron.
    """
    asked, where, fp16 = plan.asked, requested.where, dtype is FP16
    scaled = fp16 or bool(asked.get("fp16"))
    dynamic = scaled and not asked.get(STATIC)
    check_numbers(asked, (STATIC, *SCALER) if dynamic else (STATIC,), where)
    place, key, way = where, "initial_loss_scale", "Write a higher one"
    if fp16 and now.scales:
        block = parse_settings(requested.scaler, FIELDS, requested.scaler_where)
        fields = scaler_row()
        for name, field in FIELDS.items():
            if name in block or settings.is_set(name):
                fields[field] = block.get(name, settings[name])
        plan = replace(plan, adds={**plan.adds, **fields})
        if "loss_scale_init" in block:
            place, key, way = requested.scaler_where, "loss_scale_init", "Raise it"
        elif settings.is_set("loss_scale_init"):
            key, way = "PRECISION_SHIM_LOSS_SCALE_INIT", "Raise it"
    own = {**_OWN, **plan.fields}
    first, least = own["initial_loss_scale"], own["min_loss_scale"]
    if scaled and not own.get(STATIC) and least is not None and first < least:
        raise SettingsError(
            f"{place}: {key}={first:g} is below min_loss_scale={least:g} of Megatron's "
            f"OptimizerConfig. {way}, or lower min_loss_scale."
        )
    return plan


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


def predict_scaler(
    plan: OptimizerPlan, settings: Settings, dtype: torch.dtype
) -> tuple[str, str] | None:
    """Predict the decision about a planned job's loss scaler: values and reason, in words.

    ``None`` for a static loss scale, and for a model that is not fp16 unless ``fp16`` is true, for
    which the shim chooses only the factors.
    """
    fields = plan.fields
    if fields.get(STATIC):
        return None
    if not fields.get("fp16", dtype is FP16):
        return NOT_SCALED if dtype is FP16 else None
    ours = factors_set(settings)
    own = {**_OWN, **fields, **ours}
    first, interval = float(own["initial_loss_scale"]), float(own["loss_scale_window"])
    return describe_scaler(first, interval, own, ours, dtype)
