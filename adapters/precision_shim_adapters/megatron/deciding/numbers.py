"""Check the numbers in Megatron's OptimizerConfig, which takes any value and fails at a later step.

Adam computes with ``NUMBERS`` at each step, and Megatron's loss scaler is made with ``SCALER``.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from precision_shim.errors import SettingsError

NUMBERS = (
    *("lr", "decoupled_lr", "weight_decay", "clip_grad"),
    *("adam_beta1", "adam_beta2", "adam_eps"),
)
BETA2 = "adam_beta2"
SCALER = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
"""``lr_decay_style`` of Megatron's scheduler."""

MAY_BE_NULL = ("weight_decay", "decoupled_lr", "loss_scale")
"""Megatron's scheduler overwrites ``weight_decay`` before the first step."""


def refused_numbers(fields: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    """List the fields whose values are not numbers, and the loss scaler's fields that are <= 0.

    If a value is <= 0, Megatron's loss scaler ends the job at an assertion without a message.
    """
    return [
        name
        for name in names
        if name in fields
        and not (fields[name] is None and name in MAY_BE_NULL)
        and (not isinstance(fields[name], Real) or (name in SCALER and not fields[name] > 0))
    ]


def check_numbers(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    """Raise if ``refused_numbers`` lists a field.

    Args:
        fields: fields of Megatron's OptimizerConfig that the user wrote.
        names: the fields to check.
        where: framework, version and key, for the message.

    Raises:
        SettingsError: a value is not a number, or a value of the loss scaler is <= 0.
    """
    for name in refused_numbers(fields, names):
        allowed = "from 0 up to, but not including, 1" if name == BETA2 else "above 0"
        raise SettingsError(
            f"{where}: {name}={fields[name]!r} is not allowed; allowed: a number {allowed}. Write "
            "one, without quotes, or leave it out."
        )
