"""How remainders are distinguished from true masters, and which values round exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precision_shim.precision.remainders import (
    join_master,
    looks_like_remainders,
    rounds_exactly,
    split_master,
)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=32))
def test_masters_come_back_bit_for_bit(numbers):
    master = torch.tensor(numbers, dtype=torch.float32)
    param, remainder = split_master(master)
    assert param.dtype is torch.bfloat16
    assert remainder.dtype is torch.int16
    back = join_master(param, remainder)
    assert torch.equal(back.view(torch.int32), master.view(torch.int32))


def weights(seed: int = 0) -> torch.Tensor:
    return torch.randn(512, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_cast_remainders_are_told_from_masters():
    param, remainder = split_master(weights())
    assert looks_like_remainders(remainder.float(), lambda: param)
    assert not looks_like_remainders(weights(), lambda: param)


def test_remainders_of_weights_that_are_exactly_bf16_are_all_zero():
    param, remainder = split_master(weights().bfloat16().float())
    assert not remainder.any()
    assert looks_like_remainders(remainder.float(), lambda: param)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 2.0, 1001.0])
def test_honest_whole_numbers_pass(value):
    """Biases are 0 and norms 1; 1001 becomes 1000 in bf16."""
    master = torch.full((8,), value)
    assert not looks_like_remainders(master, master.bfloat16)


@pytest.mark.parametrize(("value", "looks"), [(-32768.0, True), (32767.0, True), (-32769.0, False)])
def test_remainders_are_16_bits(value, looks):
    master = torch.tensor([value, 3.0])
    assert looks_like_remainders(master, lambda: torch.zeros(2).bfloat16()) is looks


def test_the_parameter_is_not_asked_without_need():
    def never() -> torch.Tensor:
        raise AssertionError("asked")

    assert not looks_like_remainders(weights(), never)
    assert not looks_like_remainders(torch.zeros(0), never)
    assert not looks_like_remainders(torch.zeros(4, dtype=torch.int16), never)
    assert not looks_like_remainders(torch.full((4,), 1e6), never)


def test_what_rounds_exactly():
    values = weights()
    assert not rounds_exactly(values, torch.bfloat16)
    assert rounds_exactly(values.bfloat16().float(), torch.bfloat16)
    assert rounds_exactly(torch.tensor([0.0, float("inf"), float("nan")]), torch.bfloat16)
    assert rounds_exactly(torch.zeros(0), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_what_is_no_master_is_not_split(dtype):
    with pytest.raises(TypeError, match=rf"split_master wants torch.float32, got {dtype}"):
        split_master(torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize(
    ("param", "remainder"), [(torch.float16, torch.int16), (torch.bfloat16, torch.int32)]
)
def test_what_is_no_parameter_with_its_remainder_is_not_joined(param, remainder):
    with pytest.raises(TypeError, match=rf"got {param} and {remainder}"):
        join_master(torch.zeros(2, dtype=param), torch.zeros(2, dtype=remainder))
