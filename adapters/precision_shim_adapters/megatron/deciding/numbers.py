"""Check the numbers in Megatron's OptimizerConfig, which takes any value and fails at a later step.

Adam computes with ``NUMBERS`` at each step, and Megatron's loss scaler is made with ``SCALER``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from precision_shim.errors import SettingsError

NUMBERS = (
    *("lr", "decoupled_lr", "weight_decay", "clip_grad"),
    *("adam_beta1", "adam_beta2", "adam_eps"),
)
BETA2 = "adam_beta2"
SCALER = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
STATIC = "loss_scale"
"""Megatron's static loss scale; 0 and null stand for a dynamic one."""

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
"""``lr_decay_style`` of Megatron's scheduler."""

ABOVE = "that is above 0 and finite in fp32"
"""Megatron keeps a loss scale in fp32: 1e39 becomes infinite there, and skips every step."""

MAY_BE_NULL = ("weight_decay", "decoupled_lr", STATIC)
"""Megatron's scheduler overwrites ``weight_decay`` before the first step."""


def refused_numbers(fields: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    """List the written fields whose values are no numbers, or none that a loss scaler can have.

    Megatron's loss scaler ends the job at a bare assertion if a value is not above 0.
    """
    return [
        name
        for name in names
        if name in fields
        and not (fields[name] is None and name in MAY_BE_NULL)
        and (not isinstance(fields[name], Real) or not _fits(name, fields[name]))
    ]


def _fits(name: str, value: Any) -> bool:
    """Whether a number is no loss scaler's, or above 0 and finite in fp32."""
    if name not in (*SCALER, STATIC) or (name == STATIC and not value):
        return True
    try:
        return 0 < torch.tensor(float(value), dtype=torch.float32).item() < math.inf
    except OverflowError:  # an integer that no float can hold
        return False


def check_numbers(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    """Raise if ``refused_numbers`` lists a field.

    Args:
        fields: fields of Megatron's OptimizerConfig that the user wrote.
        names: the fields to check.
        where: framework, version and key, for the message.

    Raises:
        SettingsError: ``refused_numbers`` lists one of the fields.
    """
    for name in refused_numbers(fields, names):
        allowed = "from 0 up to, but not including, 1" if name == BETA2 else ABOVE
        raise SettingsError(
            f"{where}: {name}={fields[name]!r} is no number that is allowed; allowed: a number "
            f"{allowed}. Write one, without quotes, or leave it out."
        )
