"""PRECISION_SHIM_WATCH_UPDATES adds the shares of lost updates to SkyRL's workers' metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import precision_shim
from precision_shim.auditing.meters import METRICS

from .support import batch, build, fsdp_worker, metrics_of

pytestmark = pytest.mark.slow

FIGURES = set(METRICS.values())


def train(worker: Any) -> list[tuple[dict[str, float], Any]]:
    """Run four passes and steps by SkyRL's own methods; returns metrics and grad norm of each."""
    said = []
    for seed in range(4):
        found = metrics_of(worker.forward_backward(batch(seed)))
        said.append((found, worker.optim_step()))
    return said


def hold(said: list[tuple[dict[str, float], Any]], worker: Any) -> None:
    """A pass reports the step before the last one, so the third pass has the first figures."""
    for found, _ in said[:2]:
        assert FIGURES & found.keys() == set()
    # The first step has no earlier second moment, so no second moment can decrease.
    assert FIGURES & said[2][0].keys() == FIGURES - {"updates_lost_exp_avg_sq"}
    (audit,) = precision_shim.status().audit
    figures = audit.parts[0].updates
    assert figures is not None
    assert figures["step"] == 3
    newest = metrics_of(worker.forward_backward(batch(4)))
    assert {METRICS[name]: figures[name] for name in METRICS} == {
        name: newest[name] for name in FIGURES
    }
    assert 0.0 <= newest["updates_lost"] <= 1.0


def test_megatron_worker(fused_adam: str, checkpoints: dict[str, Path], shim: Any) -> None:
    rate = "trainer.policy.optimizer_config.lr=6e-6"
    plain = train(build(checkpoints["bfloat16"], rate))
    shim(settings={"watch_updates": 1})
    worker = build(checkpoints["bfloat16"], rate)
    said = train(worker)
    hold(said, worker)
    assert [norm for _, norm in said] == [norm for _, norm in plain]


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_fsdp_worker(cpu: None, checkpoints: dict[str, Path], shim: Any, role: str) -> None:
    plain = train(fsdp_worker(role, checkpoints["float32"], None))
    shim(settings={"watch_updates": 1})
    worker = fsdp_worker(role, checkpoints["float32"], None)
    said = train(worker)
    hold(said, worker)
    assert [norm for _, norm in said] == [norm for _, norm in plain]
