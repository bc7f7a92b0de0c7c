"""The mismatch of trainer and rollout by their dtypes; compares ratios within one run only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from precision_shim.precision.agreement import Engine, compare

PAIRS = [
    (trainer, rollout)
    for trainer in ("fp16", "bf16", "fp32")
    for rollout in ("fp16", "bf16", "fp32")
]


@pytest.fixture(scope="module")
def found(
    both_sides: ModuleType, size: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Any]:
    """The mismatch by the dtypes of trainer and rollout."""
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return dict(both_sides.measure(size, 0, folder))


def test_beside_an_fp16_trainer_a_bf16_rollout_keeps_the_mismatch(found: dict[Any, Any]) -> None:
    both, beside = found["fp16", "fp16"], found["fp16", "bf16"]
    assert beside.k3 > 10 * both.k3
    assert beside.mean > 4 * both.mean


@pytest.mark.parametrize("pair", PAIRS)
def test_one_side_in_bf16_is_enough(found: dict[Any, Any], pair: tuple[str, str]) -> None:
    ours, both = found[pair].k3, found["fp16", "fp16"].k3
    assert ours > 10 * both if "bf16" in pair else ours < 4 * both


def test_over_a_bf16_wire_an_fp16_rollout_keeps_the_mismatch(
    both_sides: ModuleType, found: dict[Any, Any]
) -> None:
    assert found["fp16", both_sides.WIRE].k3 > 10 * found["fp16", "fp16"].k3


def test_the_shim_warns_where_an_fp16_trainer_keeps_the_mismatch(found: dict[Any, Any]) -> None:
    trainer = Engine("actor", "fp16", "actor.dtype")
    for name in ("fp16", "bf16", "fp32"):
        verdict = compare(trainer, Engine("rollout", name, "rollout.dtype"))
        assert verdict.lost == (found["fp16", name].k3 > 10 * found["fp16", "fp16"].k3)


def test_heads_in_fp32_in_both_engines_lower_the_mismatch(
    both_sides: ModuleType, size: Any, tmp_path: Path
) -> None:
    """vLLM's own ``head_dtype``, and the trainer's head as the shim computes it.

    In a model with one layer the rounding of the logits is a quarter of the mismatch.
    """
    found = both_sides.measure_heads(replace(size, layers=1, width=256), 0, tmp_path)
    for dtype in ("fp16", "bf16"):
        without, both = found[dtype, "no engine"], found[dtype, "both"]
        assert (both.k3 < without.k3, both.mean < without.mean) == (True, True), dtype


def test_k3_and_mean_by_hand(both_sides: ModuleType) -> None:
    trainer, rollout = torch.tensor([0.5, 0.2]).log(), torch.tensor([0.25, 0.4]).log()
    compared = both_sides.mismatch(trainer, rollout)
    ln2 = torch.tensor(2.0).double().log().item()
    assert compared.mean == pytest.approx(ln2)
    assert compared.k3 == pytest.approx(((2 - 1 - ln2) + (0.5 - 1 + ln2)) / 2)
