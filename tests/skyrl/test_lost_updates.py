"""PRECISION_SHIM_WATCH_UPDATES adds the shares of lost updates to SkyRL's workers' metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import precision_shim
from precision_shim_tools.updates.lost import METRICS

from .support import batch, build, fsdp_worker, metrics_of, train_config

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
    assert newest["updates_lost"] < newest["updates_lost_rollout"]


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


def test_the_engines_copies(cpu: None, checkpoints: dict[str, Path], shim: Any) -> None:
    """A worker reads the engines' dtype when its weight sync is set up."""
    shim(settings={"watch_updates": 1, "loss_scale_init": 1.0})  # no step is skipped
    shares, stored = {}, {}
    for dtype, over in (("float16", ""), ("bfloat16", ""), ("bfloat16", "float16")):
        worker = fsdp_worker("policy", checkpoints["float32"], "fp16")
        engines = train_config(
            f"generator.inference_engine.model_dtype={dtype}",
            *([f"generator.inference_engine.engine_init_kwargs.dtype={over}"] if over else []),
        ).generator.inference_engine
        # SkyRL's own function needs vLLM, and in 0.2 asserts that it gets a client of engines.
        with pytest.raises((ModuleNotFoundError, AssertionError)):
            asyncio.run(worker.init_weight_sync_state(None, engines))
        shares[dtype, over] = train(worker)[-1][0]["updates_lost_rollout"]
        figures = precision_shim.status().audit[-1].parts[0].updates
        assert figures is not None
        stored[dtype, over] = figures["groups"][0]["rollout"]["dtype"]
    assert shares["float16", ""] < shares["bfloat16", ""] == shares["bfloat16", "float16"]
    assert list(stored.values()) == ["fp16", "bf16", "bf16"]
