"""PRECISION_SHIM_WATCH_UPDATES adds lost-update metrics to NeMo-RL's DTensor workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import precision_shim

from .support import KINDS, batch, loss_for, parameters

pytestmark = pytest.mark.slow

FIGURES = {"updates_lost", "updates_lost_exp_avg_sq"}


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]])
def test_dtensor_worker(kind: str, worker: Any, shim: Any) -> None:
    def train() -> tuple[list[dict[str, Any]], dict[str, Any], Any, Any]:
        with worker(kind, "bfloat16") as one:
            said = [
                one.train(batch(seed=seed), loss_for(kind))["all_mb_metrics"] for seed in range(3)
            ]
            looked = one.train(batch(seed=3), loss_for(kind), eval_mode=True)["all_mb_metrics"]
            return said, looked, parameters(one), precision_shim.status().audit

    _, _, plain, _ = train()
    shim(settings={"watch_updates": 1})
    (first, *later), looked, weights, audits = train()
    assert all(torch.equal(plain[name], weights[name]) for name in plain)
    assert FIGURES & first.keys() == FIGURES & looked.keys() == set()
    # The first step has no earlier second moment, so no second moment can decrease.
    assert FIGURES & later[0].keys() == FIGURES - {"updates_lost_exp_avg_sq"}
    assert later[1].keys() >= FIGURES
    assert all(len(later[1][name]) == 1 and 0.0 <= later[1][name][0] <= 1.0 for name in FIGURES)
    (audit,) = audits
    figures = audit.parts[0].updates
    assert figures is not None
    assert [figures["weights"]] == later[-1]["updates_lost"]
