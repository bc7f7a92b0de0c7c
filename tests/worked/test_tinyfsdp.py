"""The worked adapter for a trainer on FSDP2: fp16 with exact resume, on a real process group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import precision_shim
from precision_shim.scaling import LossScaler, ScalerSettings

OVERFLOW = 1e30
SCALE = {"loss_scale_init": 1024.0, "growth_interval": 2}


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    """A gloo group of this process alone."""
    store = tmp_path / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def engine(dtype: str = "float16") -> Any:
    from tinyfsdp.engine import Engine

    torch.manual_seed(7)
    layers = torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)
    return Engine({"dtype": dtype}, torch.nn.Sequential(*layers))


def train(made: Any, steps: range) -> list[dict[str, float]]:
    """Take steps of two micro-batches each; the second step overflows."""
    found = []
    for step in steps:
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + micro)
            batch = torch.randn(8, 16, generator=generator)
            made.forward_backward(batch, OVERFLOW if step == 1 and micro else 1.0)
        found.append(dict(made.optim_step()))
    return found


def parameters(made: Any) -> list[torch.Tensor]:
    return [one.detach().full_tensor().clone() for one in made.module.parameters()]


def same(one: Any, other: Any) -> bool:
    """Whether two engines have the same parameters and moments, bit for bit."""
    states = [
        [
            value.full_tensor() if hasattr(value, "full_tensor") else value
            for parameter in made.module.parameters()
            for _, value in sorted(made.optimizer.state[parameter].items())
        ]
        for made in (one, other)
    ]
    return all(
        torch.equal(*pair)
        for pair in zip(
            [*parameters(one), *states[0]], [*parameters(other), *states[1]], strict=True
        )
    )


def test_it_trains_as_a_loop_by_hand_does(on: Callable[..., Any]) -> None:
    by_hand = engine()
    settings = ScalerSettings(init_scale=1024.0, growth_interval=2)
    scaler = LossScaler(settings, device="cpu")
    for step in range(5):
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + micro)
            batch = torch.randn(8, 16, generator=generator)
            loss = by_hand.compute_loss(batch) * (OVERFLOW if step == 1 and micro else 1.0)
            scaler.scale(loss).backward()
        scaler.unscale_(by_hand.optimizer)
        by_hand.clip()
        scaler.step(by_hand.optimizer)
        scaler.update()
        by_hand.optimizer.zero_grad()
    on("tinyfsdp", **SCALE)
    made = engine()
    found = train(made, range(5))
    assert same(made, by_hand)
    assert [math.isnan(one["grad_norm"]) for one in found] == [False, True, False, False, False]
    assert [one["loss_scale"] for one in found] == [1024.0, 1024.0, 512.0, 512.0, 1024.0]
    assert found[-1]["skipped_steps"] == 1


def test_it_resumes_bit_for_bit(on: Callable[..., Any], tmp_path: Path) -> None:
    on("tinyfsdp", **SCALE)
    whole = engine()
    train(whole, range(3))
    last = train(whole, range(3, 6))
    half = engine()
    train(half, range(3))
    half.save(str(tmp_path / "checkpoint"))
    resumed = engine()
    resumed.load(str(tmp_path / "checkpoint"))
    assert train(resumed, range(3, 6)) == last
    assert same(whole, resumed)


def test_strict_refuses_an_engine_that_it_does_not_know(
    on: Callable[..., Any], changed: Callable[[str, str, str], None]
) -> None:
    changed("tinyfsdp.engine", "def optim_step(", "def optimizer_step(")
    on("tinyfsdp")
    with pytest.raises(precision_shim.SeamError, match="optim_step"):
        engine()
