"""PRECISION_SHIM_WATCH_UPDATES adds lost-update metrics to NeMo-RL's Megatron workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import precision_shim

from ..support import batch, nll_loss

pytestmark = pytest.mark.slow

FIGURES = {"updates_lost", "updates_lost_exp_avg_sq"}


def test_megatron_worker(worker: Callable[..., AbstractContextManager[Any]], shim: Any) -> None:
    def train() -> tuple[list[dict[str, Any]], torch.Tensor]:
        with worker("bfloat16", optimizer={"lr": 6e-6, "min_lr": 6e-6}) as made:
            said = [made.train(batch(seed=seed), nll_loss())["all_mb_metrics"] for seed in range(4)]
            weights = [one.detach().float().flatten() for one in made.model.parameters()]
            return said, torch.cat(weights)

    _, plain = train()
    shim(settings={"watch_updates": 1})
    (first, *later), weights = train()
    assert torch.equal(plain, weights)
    assert FIGURES & first.keys() == set()
    assert later[-1].keys() >= FIGURES
    for one in later[1:]:  # FusedAdam has no masters before its first step
        assert 0.0 <= one["updates_lost"][0] <= 1.0
    (audit,) = precision_shim.status().audit
    figures = audit.parts[0].updates
    assert figures is not None
    assert [figures["weights"]] == later[-1]["updates_lost"]
