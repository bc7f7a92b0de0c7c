"""Whether an optimizer continues from a checkpoint's states exactly."""

from __future__ import annotations

import pytest
import torch

from precision_shim.precision.continuing import how_read, master_is_lost, moment_becomes, rounded
from precision_shim.precision.dtypes import parse_dtype


def not_asked() -> bool:
    raise AssertionError("the dtypes alone tell")


@pytest.mark.parametrize(
    ("stored", "wanted", "master", "read"),
    [
        ("fp32", "fp32", True, "as it is"),
        ("int16", "int16", True, "as it is"),
        ("int16", "fp32", True, "as remainders"),
        ("int16", "fp32", False, "cast"),
        ("fp32", "int16", True, "cast"),
        ("bf16", "fp32", False, "cast"),
    ],
)
def test_how_a_tensor_is_read(stored: str, wanted: str, master: bool, read: str) -> None:
    assert how_read(stored, wanted, master=master) == read


@pytest.mark.parametrize(
    ("params", "precision_aware", "lost"),
    [("bf16", True, False), ("bf16", False, False), ("fp16", True, False), ("fp16", False, True)],
)
def test_remainders_make_masters_beside_bf16_parameters(
    params: str, precision_aware: bool, lost: bool
) -> None:
    options = {"precision_aware": precision_aware, "params": params}
    assert master_is_lost("int16", not_asked, **options) is lost


@pytest.mark.parametrize("looks", [True, False])
def test_masters_of_another_dtype_are_looked_at(looks: bool) -> None:
    assert master_is_lost("fp32", lambda: looks, precision_aware=True, params="bf16") is looks


def test_what_becomes_of_a_moment() -> None:
    assert moment_becomes("fp32", not_asked) == "exact"
    assert moment_becomes("bf16", lambda: True) == "exact"
    assert moment_becomes("bf16", lambda: False) == "rounded"
    # fp16 and fp8 moments have a scale, which is computed anew.
    assert moment_becomes("fp16", not_asked) == "scaled"
    assert moment_becomes("fp8", not_asked) == "scaled"


def test_what_a_load_rounds() -> None:
    tensors = [
        ("weights", "fp32", "bf16"),
        ("exp_avg", "fp32", "bf16"),
        ("exp_avg", "fp32", "bf16"),
        ("exp_avg_sq", "fp16", "bf16"),
        ("counts", "int64", "fp16"),
    ]
    (problem,) = rounded(tensors, "verl 0.9.1", "actor", "Keep fp32").problems
    assert str(problem) == (
        "verl 0.9.1, actor: loading this checkpoint rounds its weights and exp_avg from fp32 to "
        "bf16, its exp_avg_sq from fp16 to bf16, so that training is not the one that was saved. "
        "Keep fp32"
    )


@pytest.mark.parametrize("stored", ["float64", "fp32", "fp16", "bf16"])
@pytest.mark.parametrize("live", ["float64", "fp32", "fp16", "bf16"])
def test_a_dtype_that_holds_all_numbers_of_another_rounds_none(stored: str, live: str) -> None:
    here = parse_dtype(live) or torch.float64
    there = parse_dtype(stored) or torch.float64
    found = rounded([("weights", stored, live)], "", "", "")
    assert bool(found.problems) == (torch.promote_types(there, here) is not here)
