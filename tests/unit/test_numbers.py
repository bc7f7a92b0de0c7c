"""Numbers of Megatron's OptimizerConfig that plan and worker refuse."""

from __future__ import annotations

import math

import pytest

from precision_shim.errors import SettingsError
from precision_shim_adapters.megatron.policy.legality import (
    BETA2,
    SCALER,
    STATIC,
    check_numbers,
    refused_numbers,
)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, 1e39, 10**400, 1e-300, "1", None])
@pytest.mark.parametrize("name", [*SCALER, STATIC])
def test_numbers_that_no_loss_scaler_has(name: str, value: object) -> None:
    dynamic = name == STATIC and not value  # a dynamic scale
    steps = name in SCALER[2:] and isinstance(value, float | int) and value > 0  # not in fp32
    assert refused_numbers({name: value}, (name,)) == [name] * (not dynamic and not steps)
    if not dynamic and not steps:
        with pytest.raises(SettingsError, match=r"is not allowed; allowed: .*above 0"):
            check_numbers({name: value}, (name,), "here")


@pytest.mark.parametrize("value", [1, 2.0**16, 3.4e38, 1e-40])
def test_numbers_that_a_loss_scaler_has(value: float) -> None:
    names = (*SCALER, STATIC)
    assert refused_numbers(dict.fromkeys(names, value), names) == []


def test_another_number_has_no_bounds() -> None:
    assert refused_numbers({BETA2: -1e39}, (BETA2,)) == []
    assert refused_numbers({BETA2: "1"}, (BETA2,)) == [BETA2]
