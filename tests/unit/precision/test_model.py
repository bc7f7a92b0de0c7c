"""The facts about a model that count: its trainable parameters, by dtype."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from precision_shim.precision.model import TrainableDtypes, trainable_dtypes

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def parameter(dtype, size=4, *, trainable=True):
    return torch.nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=trainable)


def test_counts_elements_and_not_tensors():
    found = trainable_dtypes([parameter(BF16, 3), parameter(BF16, 5), parameter(FP32, 2)])
    assert dict(found.counts) == {BF16: 8, FP32: 2}
    assert found.single is None
    assert str(found) == "bf16: 8, fp32: 2"


def test_frozen_parameters_do_not_count():
    lora = [parameter(BF16, 1000, trainable=False), parameter(FP32, 2), parameter(FP32, 3)]
    assert trainable_dtypes(lora).single is FP32
    assert dict(trainable_dtypes(lora).counts) == {FP32: 5}


def test_a_model_without_trainable_parameters_has_no_dtype():
    for parameters in ([], [parameter(BF16, trainable=False)]):
        found = trainable_dtypes(parameters)
        assert found.single is None
        assert not found.counts
        assert str(found) == "none"


def test_fp8_parameters_have_no_single_dtype():
    quantized = parameter(BF16)
    # TransformerEngine's tensors have ``_fp8_dtype``, and the dtype bf16
    quantized._fp8_dtype = "e4m3"
    for mine in (quantized, parameter(torch.uint8, trainable=False)):
        found = trainable_dtypes([mine, parameter(BF16)])
        assert found.quantized == mine.requires_grad
    found = trainable_dtypes([quantized])
    assert found.single is None
    assert "fp8" in str(found)


def test_one_byte_parameters_are_fp8():
    class Bytes:
        dtype = torch.float8_e4m3fn
        requires_grad = True

        def numel(self):
            return 7

    assert trainable_dtypes([Bytes()]).quantized


counts = st.dictionaries(st.sampled_from([FP32, BF16, FP16]), st.integers(1, 10**12))


@given(counts, counts, st.booleans(), st.booleans())
def test_chunks_add_up(left, right, left_fp8, right_fp8):
    both = TrainableDtypes(left, left_fp8) + TrainableDtypes(right, right_fp8)
    assert sum(both.counts.values()) == sum(left.values()) + sum(right.values())
    assert set(both.counts) == {*left, *right}
    assert both.quantized == (left_fp8 or right_fp8)
