"""SkyRL's Megatron strategy saves, the shim is turned on or off, and the strategy resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim

from ..every_framework.checkpoint_doctor import ask, told_by
from ..stand_ins.optimizer_states import live_states, reads_remainders
from .support import batch, build, metrics_of

KWARGS = "trainer.policy.megatron_config.optimizer_config_kwargs"
BETA = f"{KWARGS}.adam_beta2=0.95"
PRECISION_AWARE = "use_precision_aware_optimizer"
OWN = f"{KWARGS}.{PRECISION_AWARE}=true"


def train(worker: Any, seeds: range) -> list[Any]:
    return [
        (metrics_of(worker.forward_backward(batch(seed))), worker.optim_step()) for seed in seeds
    ]


def states(worker: Any) -> list[torch.Tensor]:
    """Copies of fp32 master, exp_avg and exp_avg_sq of every parameter."""
    return [
        value.detach().float().clone()
        for _, master, state in live_states(worker.optimizer)
        for value in (master, state["exp_avg"], state["exp_avg_sq"])
    ]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def go_on(
    fused_adam: str, checkpoints: dict[str, Path], shim: Any, tmp_path: Path
) -> Callable[..., str]:
    def turn(on: bool, states: str) -> None:
        precision_shim.uninstall()
        if on:
            shim(settings={"optimizer_states": states})

    def go(first_on: bool, second_on: bool, *overrides: str, states_by: str = "auto") -> str:
        """Returns ``exact``, ``exact until it trains``, ``other weights``, or an error's name."""
        folder = str(tmp_path / f"{first_on}-{second_on}")
        turn(first_on, states_by)
        first = build(checkpoints["bfloat16"], BETA, *overrides)
        train(first, range(2))
        first.save_checkpoint(folder)
        saved = states(first)
        straight = train(first, range(2, 4))
        turn(second_on, states_by)
        second = build(checkpoints["bfloat16"], BETA, *overrides)
        declared_states = ask(folder, "skyrl", {PRECISION_AWARE: True} if OWN in overrides else {})

        def load() -> str:
            try:
                second.load_checkpoint(folder)
            except Exception as error:  # Megatron raises several kinds
                return type(error).__name__
            if not same(saved, states(second)):
                return "other weights"
            return "exact" if train(second, range(2, 4)) == straight else "exact until it trains"

        done = load()
        assert declared_states.outcome.verdict == told_by(done), declared_states.outcome
        return done

    return go


@pytest.mark.slow
def test_remainders_that_the_config_asks_for_stay_remainders(go_on: Any) -> None:
    """If the shim is off at the resume, the job resumes like a job that never had the shim."""
    by_itself = go_on(False, False, OWN)
    assert (by_itself == "exact") == reads_remainders()
    assert go_on(True, False, OWN) == by_itself
    assert go_on(True, True, OWN) == "exact"
    assert go_on(False, True, OWN) == "exact"


def test_remainders_that_the_shim_made_are_written_as_whole_masters(go_on: Any) -> None:
    follow = {"states_by": "follow-model"}
    assert go_on(True, True, **follow) == "exact"
    # Without the shim the optimizer states are fp32, so Megatron no longer rounds them.
    assert go_on(True, False, **follow) == "exact until it trains"
    assert go_on(False, True, **follow) == "CheckpointLayoutError"


@pytest.mark.parametrize("own", [(), (OWN, f"{KWARGS}.store_param_remainders=false")])
def test_weights_that_are_loaded_alone(
    fused_adam: str, checkpoints: dict[str, Path], shim: Any, tmp_path: Path, own: tuple[str, ...]
) -> None:
    """Without the shim the next step restores the old weights (SkyRL's pull request 2149)."""
    shim(settings={"optimizer_states": "as-configured"})

    def weights(worker: Any) -> list[torch.Tensor]:
        return [p.detach().clone() for chunk in worker.actor_module for p in chunk.parameters()]

    first = build(checkpoints["bfloat16"], BETA, *own)
    train(first, range(2))
    first.save_checkpoint(str(tmp_path / "saved"))
    saved = weights(first)
    second = build(checkpoints["bfloat16"], BETA, *own)
    train(second, range(7, 8))
    second.load_checkpoint(
        str(tmp_path / "saved"), load_optimizer_states=False, load_lr_scheduler_states=False
    )
    assert same(saved, weights(second))
    for group in second.optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    second.forward_backward(batch(9))
    second.optim_step()
    assert same(saved, weights(second))
