"""The mismatch of trainer and rollout by their dtypes: ratios within one run, and no figure."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def found(
    both_sides: ModuleType, size: Any, model: Any, checkpoint: Path
) -> dict[tuple[str, str], Any]:
    """Mismatch by the dtypes of trainer and rollout."""
    prompts, every = both_sides.random_prompts(size, seed=0), {}
    for rollout in ("fp16", "bf16"):
        name = both_sides.name_in_vllm(both_sides.DTYPES[rollout])
        with both_sides.engine(checkpoint, name, size.prompt + size.new) as llm:
            sampled = both_sides.sample(llm, prompts, size.new)
        for trainer in ("fp16", "bf16"):
            scored = both_sides.score(model, sampled, both_sides.DTYPES[trainer])
            every[trainer, rollout] = both_sides.mismatch(scored, sampled.logprobs)
    return every


def test_beside_an_fp16_trainer_a_bf16_rollout_keeps_the_mismatch(found: dict[Any, Any]) -> None:
    both, beside = found["fp16", "fp16"], found["fp16", "bf16"]
    assert beside.k3 > 10 * both.k3
    assert beside.mean > 4 * both.mean


def test_an_fp16_trainer_alone_gains_nothing(found: dict[Any, Any]) -> None:
    for pair in (("fp16", "bf16"), ("bf16", "fp16")):
        assert found["bf16", "bf16"].k3 < 4 * found[pair].k3


def test_k3_and_mean_by_hand(both_sides: ModuleType) -> None:
    trainer, rollout = torch.tensor([0.5, 0.2]).log(), torch.tensor([0.25, 0.4]).log()
    compared = both_sides.mismatch(trainer, rollout)
    ln2 = torch.tensor(2.0).double().log().item()
    assert compared.mean == pytest.approx(ln2)
    assert compared.k3 == pytest.approx(((2 - 1 - ln2) + (0.5 - 1 + ln2)) / 2)
