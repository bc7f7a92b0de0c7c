"""ROLL's Megatron strategy, with the shim on and off."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim_adapters.roll import adapter
from precision_shim_tools.testing import measure_bytes

from ..every_framework.checkpoint_doctor import ask
from ..every_framework.taken_out import Seams, refused_whole
from .driving import OVERFLOW, Trainer, skipped

On = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("one_process")
SCALE = 1024.0
BF16 = torch.bfloat16


def at(scale: float, trainer: Trainer, **more: Any) -> Trainer:
    """Give the scalers another scale: ROLL's config has no field for the scale."""
    for one in trainer.scalers:
        one.load_state_dict({**one.state_dict(), "scale": torch.tensor([scale])})
        vars(one).update(more)
    return trainer


def norms(trainer: Trainer, count: int = 3) -> list[float]:
    return [trainer.norm(number) for number in range(count)]


def decisions() -> list[str]:
    return [
        f"{one.subject} {one.feature} {one.chosen}" for one in precision_shim.status().decisions
    ]


@pytest.mark.parametrize("moe", [None, 2], ids=["dense", "experts"])
def test_the_loss_is_scaled(on: On, moe: int | None) -> None:
    """A dense optimizer is not chained, and ROLL never calls ``get_megatron_optimizer``."""
    right = norms(Trainer.of(torch.float32, moe))
    wrong = norms(at(SCALE, Trainer.of(moe=moe)))
    assert wrong[0] == pytest.approx(right[0] / SCALE, rel=0.5)
    on()
    patched = at(SCALE, Trainer.of(moe=moe))
    assert norms(patched) == pytest.approx(right, rel=0.5)
    assert [one._growth_tracker for one in patched.scalers] == [3] * len(patched.scalers)


def test_a_grad_scale_func_of_rolls_own_stays(on: On) -> None:
    on()
    trainer = Trainer.of()
    config = trainer.strategy.models_wrapped[0].config
    assert config.grad_scale_func == trainer.strategy.optimizer.scale_loss
    assert Trainer.of(BF16).strategy.models_wrapped[0].config.grad_scale_func is None


def test_a_skip_is_counted_and_reported(on: On) -> None:
    unpatched = at(SCALE, Trainer.of(check_for_nan_in_loss_and_grad=False))
    unpatched.strategy.models_wrapped[
        0
    ].config.grad_scale_func = unpatched.strategy.optimizer.scale_loss
    with pytest.raises(RuntimeError, match="found NaN"):  # the DDP's check, on by default
        Trainer.of().step(0, math.nan)
    with pytest.raises(NotImplementedError):
        unpatched.step(0, OVERFLOW)
    on()
    trainer = at(SCALE, Trainer.of(), hysteresis=1, _hysteresis_tracker=1)
    first = trainer.step(0)
    assert first.items() >= {"loss_scale": SCALE, "skipped_steps": 0.0}.items()
    assert skipped(trainer, 1)
    assert trainer.step(2).items() >= {"loss_scale": SCALE / 2, "skipped_steps": 1.0}.items()


@pytest.mark.parametrize("states", ["auto", "follow-model"])
def test_states_stay_fp32_because_of_the_offload(on: On, states: str) -> None:
    plain = Trainer.of(BF16, adam_beta2=0.95)
    on(optimizer_states=states)
    trainer = Trainer.of(BF16, adam_beta2=0.95)
    assert norms(trainer) == norms(plain)
    assert all(map(torch.equal, trainer.parameters(), plain.parameters()))
    chunks, optimizer = trainer.strategy.models_wrapped, trainer.strategy.optimizer
    assert not optimizer.config.use_precision_aware_optimizer
    as_before = measure_bytes(plain.strategy.models_wrapped, plain.strategy.optimizer)
    assert measure_bytes(chunks, optimizer).per_parameter == as_before.per_parameter
    because = [one.because for one in precision_shim.status().decisions]
    assert any("ROLL's offload moves all states" in one for one in because)


def test_a_dense_optimizer_is_audited(on: On, capfd: pytest.CaptureFixture[str]) -> None:
    on()
    trainer = Trainer.of(BF16)
    trainer.step(0)
    assert "[precision_shim] roll actor_train: audit: bf16 parameters" in capfd.readouterr().err


def test_a_resume_is_exact(on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import dist_checkpointing

    on(growth_interval=3)

    def train(trainer: Trainer, numbers: range) -> None:
        for number in numbers:
            trainer.step(number, OVERFLOW if number == 1 else 1.0)

    def state(trainer: Trainer, *, is_loading: bool) -> Any:
        strategy = trainer.strategy
        model = strategy.models_unwrapped[0].sharded_state_dict()
        return {
            "model": model,
            "optimizer": strategy.optimizer.sharded_state_dict(
                model, is_loading=is_loading, metadata=strategy.ckpt_sharding_metadata
            ),
        }

    def load(trainer: Trainer) -> None:
        found = dist_checkpointing.load(state(trainer, is_loading=True), str(tmp_path))
        trainer.strategy.models_unwrapped[0].load_state_dict(found["model"])
        trainer.strategy.optimizer.load_state_dict(found["optimizer"])

    whole, half, resumed = (Trainer.of() for _ in range(3))
    # Undo mcore_adapter's replacement of this torch function, which returns what torch 2.9 does.
    planner = "torch.distributed.checkpoint.default_planner"
    monkeypatch.setattr(f"{planner}._validate_global_plan", lambda *ignored: [])
    train(whole, range(6))
    train(half, range(3))
    dist_checkpointing.save(state(half, is_loading=False), str(tmp_path))
    load(resumed)
    resumed.strategy.scheduler.load_state_dict(half.strategy.scheduler.state_dict())
    train(resumed, range(3, 6))
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    assert whole.scalers[0].state_dict() == resumed.scalers[0].state_dict()
    precision_shim.uninstall()
    bare = Trainer.of()
    load(bare)
    assert all(map(torch.equal, half.parameters(), bare.parameters()))
    assert half.scalers[0].state_dict() == bare.scalers[0].state_dict()


def test_the_doctor_knows_its_checkpoint(
    on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on()
    trainer = Trainer.of()
    trainer.step(0)
    # Undo mcore_adapter's replacement of this torch function, which returns what torch 2.9 does.
    planner = "torch.distributed.checkpoint.default_planner"
    monkeypatch.setattr(f"{planner}._validate_global_plan", lambda *ignored: [])
    trainer.save(tmp_path / "checkpoint-3")
    found = ask(tmp_path, "roll")
    assert found.part.dtypes("params") == {"fp16": sum(map(torch.numel, trainer.parameters()))}
    assert found.outcome.exact, found.outcome


# -- installing and removing -------------------------------------------------------------------


class TestSeams(Seams):
    pass


def test_a_version_without_a_symbol_is_refused_whole(
    on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused_whole(on, monkeypatch, adapter, "MegatronTrainStrategy.train_step")
