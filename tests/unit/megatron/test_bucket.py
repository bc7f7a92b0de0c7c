"""The bucket's dtype follows the main gradients in both directions, unless the user set it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precision_shim.precision.model import TrainableDtypes
from precision_shim_adapters.megatron.policy.bucket import choose_bucket

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ONLY_BF16, ONLY_FP16 = TrainableDtypes({BF16: 100}), TrainableDtypes({FP16: 100})
MIXED = TrainableDtypes({BF16: 100, FP32: 2})
FP8 = TrainableDtypes({BF16: 100}, quantized=True)
NOTHING = TrainableDtypes()

models = st.builds(
    TrainableDtypes,
    st.dictionaries(st.sampled_from([FP32, BF16, FP16]), st.integers(1, 99), max_size=3),
    st.booleans(),
)
inputs = st.fixed_dictionaries(
    {"present": st.booleans(), "main_grads": st.sampled_from([FP32, BF16, FP16]), "model": models}
)


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize(
    ("main_grads", "model", "fp32"),
    [
        (BF16, ONLY_BF16, False),
        (FP32, ONLY_BF16, True),
        (FP32, ONLY_FP16, True),
        (FP16, ONLY_FP16, False),
        (BF16, ONLY_FP16, True),  # a bucket's dtype is that of its parameters, or fp32
        (BF16, MIXED, True),
        (BF16, FP8, False),  # its bucket has the nominal dtype
        (BF16, NOTHING, False),  # a chunk that trains nothing gets the same bucket as the others
        (FP32, MIXED, True),
    ],
)
def test_follows_the_main_gradients_in_both_directions(present, main_grads, model, fp32):
    choice = choose_bucket(
        present=present, user_set=False, align=False, main_grads=main_grads, model=model
    )
    assert choice.grad_reduce_in_fp32 is fp32
    assert choice.problem == ""
    assert "main grads are" in choice.because


@given(inputs)
def test_what_the_user_wrote_is_never_changed(case):
    choice = choose_bucket(user_set=True, align=False, **case)
    assert choice.grad_reduce_in_fp32 is case["present"]
    assert choice.because == "set by the user"


@given(inputs)
def test_what_the_user_wrote_is_called_inconsistent_where_alignment_would_change_it(case):
    kept = choose_bucket(user_set=True, align=False, **case)
    aligned = choose_bucket(user_set=False, align=False, **case)
    assert bool(kept.problem) is (aligned.grad_reduce_in_fp32 != case["present"])
    if kept.problem:
        assert f"grad_reduce_in_fp32={case['present']}" in kept.problem
        assert f"{aligned.because}. Write {not case['present']}" in kept.problem


@given(inputs)
def test_align_overrides_the_user_as_if_nothing_was_written(case):
    assert choose_bucket(user_set=True, align=True, **case) == choose_bucket(
        user_set=False, align=False, **case
    )


@given(inputs, st.booleans())
def test_aligning_twice_is_aligning_once(case, align):
    once = choose_bucket(user_set=False, align=align, **case)
    case["present"] = once.grad_reduce_in_fp32
    again = choose_bucket(user_set=False, align=align, **case)
    assert again.grad_reduce_in_fp32 is once.grad_reduce_in_fp32


@given(inputs)
def test_a_low_precision_bucket_only_where_all_parameters_have_that_dtype(case):
    choice = choose_bucket(user_set=False, align=False, **case)
    if not choice.grad_reduce_in_fp32:
        assert set(case["model"].counts) <= {case["main_grads"]}
        assert case["main_grads"] is not FP32
