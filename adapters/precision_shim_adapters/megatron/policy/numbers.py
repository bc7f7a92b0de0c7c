"""Check the numbers in Megatron's OptimizerConfig, which takes any value and fails at a later step.

The shim computes with ``BETA2``, and Megatron's loss scaler is made with ``SCALER``.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from precision_shim.errors import SettingsError

BETA2 = "adam_beta2"
SCALER = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
STATIC = "loss_scale"
"""Megatron's static loss scale; 0 and null mean a dynamic loss scale."""

_SCALES = ("initial_loss_scale", "min_loss_scale", STATIC)
_FP32 = (2.0**-149, (2 - 2.0**-23) * 2.0**127)
"""The smallest and the largest positive number in fp32, in which a loss scaler stores its scale."""


def refused_numbers(fields: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    """List the fields whose values are not numbers, and the loss scaler's fields that are <= 0.

    If a value is <= 0, Megatron's loss scaler ends the job at an assertion without a message. A
    scale that overflows or underflows in fp32 stays infinite or 0.
    """
    return [
        name
        for name in names
        if name in fields
        and not (fields[name] is None and name == STATIC)
        and (not isinstance(fields[name], Real) or not _fits(name, fields[name]))
    ]


def _fits(name: str, value: Any) -> bool:
    if name in _SCALES:
        return bool(_FP32[0] <= value <= _FP32[1]) or (name == STATIC and value == 0)
    return bool(value > 0) or name not in SCALER


def allowed(name: str) -> str:
    """The values that a field may have, in words."""
    if name == BETA2:
        return "a number from 0 up to, but not including, 1"
    if name == STATIC:
        return "0 for a dynamic loss scale, or a number above 0 and up to 3.4e38"
    bound = " and up to 3.4e38" if name in _SCALES else ""
    return f"a number above 0{bound}" if name in SCALER else "a number"


def check_numbers(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    """Raise if ``refused_numbers`` lists a field; ``where`` names framework, version and key.

    Raises:
        SettingsError: a value is not a number, or is one that the loss scaler cannot use.
    """
    for name in refused_numbers(fields, names):
        raise SettingsError(
            f"{where}: {name}={fields[name]!r} is not allowed; allowed: {allowed(name)}. Write "
            "one, without quotes, or leave it out."
        )
