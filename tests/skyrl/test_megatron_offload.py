"""SkyRL moves the optimizer's states to the CPU between its phases, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .support import batch, build, metrics_of

BETA = "trainer.policy.megatron_config.optimizer_config_kwargs.adam_beta2=0.95"


@pytest.fixture
def make(fused_adam: str, checkpoints: dict[str, Path]) -> Callable[..., Any]:
    """Make a bf16 policy worker whose optimizer is precision-aware."""
    return lambda: build(checkpoints["bfloat16"], BETA)


def train(worker: Any, seed: int) -> tuple[dict[str, float], Any]:
    return metrics_of(worker.forward_backward(batch(seed))), worker.optim_step()


def states(worker: Any) -> list[dict[str, Any]]:
    chained = getattr(worker.optimizer, "chained_optimizers", [worker.optimizer])
    return [state for one in chained for state in one.optimizer.state.values()]


def test_masters_move_with_the_moments(make: Any, shim: Any, moves: list[tuple[int, str]]) -> None:
    from skyrl.backends.skyrl_train.distributed.megatron import megatron_strategy as strategy

    shim(settings={"optimizer_states": "follow-model"})
    worker = make()
    train(worker, 0)
    kept = {id(state["master_param"]) for state in states(worker)}
    assert kept
    del moves[:]
    strategy.offload_megatron_optimizer(worker.optimizer)
    away = {tensor for tensor, where in moves if where == "cpu"}
    assert kept <= away
    back = {id(state["master_param"]) for state in states(worker)}
    del moves[:]
    strategy.load_megatron_optimizer(worker.optimizer)
    home = {tensor for tensor, _ in moves}
    assert back <= home
