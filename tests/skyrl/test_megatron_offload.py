"""SkyRL moves the optimizer's states to the CPU between its phases, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..stand_ins.optimizer_states import hold_masters_to_moments
from .support import batch, build, metrics_of

BETA = "trainer.policy.megatron_config.optimizer_config_kwargs.adam_beta2=0.95"


@pytest.fixture
def make(fused_adam: str, checkpoints: dict[str, Path]) -> Callable[..., Any]:
    """Make a bf16 policy worker whose optimizer is precision-aware."""
    return lambda: build(checkpoints["bfloat16"], BETA)


def train(worker: Any, seed: int) -> tuple[dict[str, float], Any]:
    return metrics_of(worker.forward_backward(batch(seed))), worker.optim_step()


def test_masters_move_with_the_moments(make: Any, shim: Any, moves: list[tuple[int, str]]) -> None:
    from skyrl.backends.skyrl_train.distributed.megatron import megatron_strategy as strategy

    shim(settings={"optimizer_states": "follow-model"})
    worker = make()
    train(worker, 0)
    functions = (strategy.offload_megatron_optimizer, strategy.load_megatron_optimizer)
    hold_masters_to_moments(worker.optimizer, moves, *functions)
