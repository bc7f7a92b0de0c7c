"""The real vLLM and transformers with quantized layers: the order that docs/numerics.md shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks import formats
from benchmarks.both_sides import Size

BF16, BLOCKS, TENSOR = "bf16", "fp8, blocks", "fp8, per tensor"


@pytest.fixture(scope="module")
def found(both_sides: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each pair's mismatch, of one small model; ``both_sides`` imports vLLM."""
    size = Size(layers=2, width=256, vocabulary=128, prompts=16, prompt=8, new=16)
    return formats.measure(size, 0, tmp_path_factory.mktemp("model"))


def test_bf16_on_both_sides_has_the_least_mismatch(found: Any) -> None:
    assert min(found, key=lambda pair: found[pair].k3) == (BF16, BF16)


@pytest.mark.parametrize("name", [BLOCKS, "mxfp8"])
def test_one_format_on_both_sides_is_nearer_than_on_one(found: Any, name: str) -> None:
    assert found[name, name].k3 < found[BF16, name].k3


def test_another_scaling_is_as_far_as_another_format(found: Any) -> None:
    assert found[BLOCKS, BLOCKS].k3 < found[BLOCKS, TENSOR].k3


def test_four_bits_are_farther_than_eight(found: Any) -> None:
    assert found[BF16, "mxfp8"].k3 < found[BF16, "nvfp4"].k3
    assert found["mxfp8", "mxfp8"].k3 < found["nvfp4", "nvfp4"].k3


def test_numbers_of_a_format_stay_as_they_are() -> None:
    """e2m1 has these numbers, and e4m3 has them times a power of two."""
    matrix = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6]).repeat(4, 8)
    assert torch.equal(formats.nvfp4(matrix), matrix)
    assert torch.equal(formats.mxfp8(matrix), matrix)


@pytest.mark.parametrize("block", [None, (1, 128), (128, 128)])
def test_e4m3s_numbers_stay_where_each_block_has_the_largest(block: tuple[int, int] | None) -> None:
    """The first half of the bytes are the positive numbers up to 448, the second the negative."""
    row = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num()
    matrix = row.repeat(128, 1)
    near = matrix.where(matrix.abs() == 448, matrix * 1.02)  # its neighbours are at least 1/15 off
    for one in (matrix, near):
        assert torch.equal(formats.scaled_e4m3(block)(one), matrix)
