"""Which written dtypes have no effect, and what is said of them."""

from __future__ import annotations

import pytest

from precision_shim.precision.effect import COMPUTES, Written, without_effect

HELD = {"exp_avg": ("fp32",), "master": ("int16",), "params": ("fp32",), "frozen": ("bf16",)}
HELD |= {COMPUTES: ("bf16",)}
LOW = Written("exp_avg_dtype", "bf16", "exp_avg", "aware=true")


@pytest.mark.parametrize(
    "one",
    [
        Written("exp_avg_dtype", "torch.float32", "exp_avg"),
        Written("main_params_dtype", "fp32", "master"),  # stored as remainders
        Written("model_dtype", "bf16", "params"),  # beneath LoRA adapters
        Written("exp_avg_sq_dtype", "bf16", "exp_avg_sq"),  # no such tensors, or unknown ones
        Written("dtype", "auto", COMPUTES),
        Written("dtype", None, COMPUTES),
        Written("fsdp_output_dtype", "float32", read=False, fixed="fp32"),
        Written("precison", "bfloat16", COMPUTES, read=False),
    ],
    ids=str,
)
def test_a_key_that_is_in_force_or_cannot_be_judged(one: Written) -> None:
    assert without_effect([one], HELD).problems == ()


@pytest.mark.parametrize(
    ("written", "message", "remedy"),
    [
        (
            [LOW],
            "exp_avg_dtype=bf16 has no effect: exp_avg is fp32",
            "Write aware=true, or leave exp_avg_dtype out.",
        ),
        (
            [LOW, Written("override.exp_avg_dtype", "float32", "exp_avg")],
            "exp_avg_dtype=bf16 has no effect: exp_avg is fp32, as override.exp_avg_dtype=float32 "
            "says",
            "Leave exp_avg_dtype or override.exp_avg_dtype out.",
        ),
        (
            [Written("dtype", "float16", COMPUTES)],
            "dtype=float16 has no effect: the layers compute in bf16",
            "Leave dtype out.",
        ),
        (
            [Written("parm_dtype", "fp16")],
            "parm_dtype=fp16 has no effect: nothing reads this key",
            "Leave parm_dtype out.",
        ),
        (
            [Written("precison", "fp16", COMPUTES, read=False), Written("dtype", "bf16", COMPUTES)],
            "precison=fp16 has no effect: nothing reads this key",
            "Leave precison out.",
        ),
        (
            [Written("fsdp_output_dtype", "param", read=False, fixed="fp32")],
            "fsdp_output_dtype=param has no effect: nothing reads this key",
            "Leave fsdp_output_dtype out.",
        ),
    ],
)
def test_what_is_said(written: list[Written], message: str, remedy: str) -> None:
    (found,) = without_effect(written, HELD).problems
    assert (found.message, found.remedy) == (message, remedy)
