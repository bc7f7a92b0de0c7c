"""ROLL's FSDP2 strategy, with the shim on and off."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.scaling import FILE_NAME, LossScaler
from precision_shim_adapters.roll import adapter

from ..every_framework.checkpoint_doctor import ask
from ..every_framework.shim_warnings import ours
from ..every_framework.taken_out import refused_whole
from ..every_framework.without_effect import Case, cases, hold
from .driving import OVERFLOW
from .sharded import Trainer

On = Callable[..., Any]
FIRST = 65536.0
pytestmark = pytest.mark.usefixtures("one_process")


def same(one: Trainer, other: Trainer) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def finite(trainer: Trainer) -> list[bool]:
    """For each parameter, whether all of its numbers are finite."""
    return [bool(one.isfinite().all()) for one in trainer.parameters()]


def test_the_parameters_are_fp32(on: On, tmp_path: Path) -> None:
    """The shim lets ROLL load an fp16 model in fp32; FSDP2 still computes in fp16."""
    on()
    trainer = Trainer.of(tmp_path)
    assert trainer.strategy.fsdp_config["mp_policy"].param_dtype is torch.float16
    assert trainer.strategy.worker_config.model_args.compute_dtype is torch.float16
    computed = []
    layer = trainer.strategy.model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda layer, given, result: computed.append(result.dtype))
    norms = [trainer.step(number)["grad_norm"] for number in range(2)]
    assert set(computed) == {torch.float16}
    assert {one.dtype for one in trainer.parameters()} == {torch.float32}
    assert {one.dtype for one in trainer.moments()} == {torch.float32}
    assert all(map(math.isfinite, norms))
    assert all(finite(trainer))


def test_with_lora_the_base_model_is_loaded_as_before(on: On, tmp_path: Path) -> None:
    """peft itself keeps the trained adapters in fp32."""
    on()
    loading = sys.modules["precision_shim_adapters.roll.training"]._loading_fp32
    for target, dtype in ((["q_proj"], torch.float16), (None, torch.float32)):
        given = SimpleNamespace(compute_dtype=torch.float16, lora_target=target)
        assert loading(lambda *, model_args: model_args.compute_dtype)(model_args=given) is dtype
        assert given.compute_dtype is torch.float16


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_bf16_weights_without_masters(on: On, tmp_path: Path, dtype: str | None) -> None:
    """ROLL stores the parameters in ``param_dtype``, and without that key in fp32."""
    on()
    with ours() as said:
        trainer = Trainer.of(tmp_path, dtype, training_args={"learning_rate": 1e-6})
        trainer.step(0)
    told = r"no-master \(.* 0 of the 8 bits .*leave actor_train\.strategy_args.*param_dtype out"
    assert [bool(re.search(told, line)) for line in said] == [True] * bool(dtype)
    (audit,) = precision_shim.status().audit
    assert [one.code for one in audit.problems] == ["no-master"] * bool(dtype)


def test_each_step_ends(on: On, tmp_path: Path) -> None:
    """The training equals ROLL's own loop and scaler, with the step ended by hand, bit for bit.

    In both trainings the parameters are fp32.
    """
    plain = Trainer.of(tmp_path, stored=torch.float32).with_rolls_own_scaler()
    right = []
    for number in range(3):
        right.append(plain.step(number)["grad_norm"])
        plain.end_by_hand()
    on()
    trainer = Trainer.of(tmp_path)
    assert isinstance(trainer.strategy.scaler, LossScaler)
    found = [trainer.step(number) for number in range(3)]
    assert [one["grad_norm"] for one in found] == right
    assert same(trainer, plain)
    assert trainer.moved == 3
    assert trainer.cleared
    assert found[-1].items() >= {"loss_scale": FIRST, "skipped_steps": 0.0}.items()


@pytest.mark.parametrize(("accumulated", "steps"), [(1, 2), (2, 1)])
def test_several_batches_in_a_call(on: On, tmp_path: Path, accumulated: int, steps: int) -> None:
    written = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulated}
    plain = Trainer.of(tmp_path, "bfloat16", training_args=written)
    plain.step(0)
    on()
    trainer = Trainer.of(tmp_path, training_args=written)
    trainer.step(0)
    assert (plain.moved, trainer.moved) == (steps, steps)
    assert trainer.cleared
    assert trainer.strategy.scaler.counter.steps == steps


def test_without_a_step_nothing_is_ended_or_reported(on: On, tmp_path: Path) -> None:
    on()
    trainer = Trainer.of(tmp_path)
    trainer.step(0, OVERFLOW)
    assert "grad_norm" not in trainer.step(1, no_sync=True)
    assert trainer.moved == 1
    assert not trainer.cleared


def test_an_overflow_is_a_skipped_step(on: On, tmp_path: Path) -> None:
    on()
    trainer = Trainer.of(tmp_path)
    before = trainer.parameters()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Detected call of `lr_scheduler.step")
        found = trainer.step(0, OVERFLOW)
    assert math.isnan(found["grad_norm"])
    assert found.items() >= {"loss_scale": FIRST, "skipped_steps": 1.0}.items()
    assert all(map(torch.equal, before, trainer.parameters()))
    assert trainer.moved == 1
    assert trainer.cleared
    found = trainer.step(1)
    assert found.items() >= {"loss_scale": FIRST / 2, "skipped_steps": 1.0}.items()
    assert math.isfinite(found["grad_norm"])
    assert not all(map(torch.equal, before, trainer.parameters()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_another_dtype_trains_as_before(on: On, tmp_path: Path, dtype: str) -> None:
    plain = Trainer.of(tmp_path, dtype)
    right = [plain.step(number)["grad_norm"] for number in range(3)]
    on()
    trainer = Trainer.of(tmp_path, dtype)
    assert [trainer.step(number)["grad_norm"] for number in range(3)] == right
    assert same(trainer, plain)
    assert trainer.strategy.scaler is None


# -- checkpoints -------------------------------------------------------------------------------


@pytest.fixture
def torchs_own_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo mcore_adapter's replacement of a torch function, which returns what torch 2.9 does."""
    planner = "torch.distributed.checkpoint.default_planner"
    monkeypatch.setattr(f"{planner}._validate_global_plan", lambda *ignored: [])


@pytest.mark.usefixtures("torchs_own_check")
@pytest.mark.parametrize("last", [True, False], ids=["last", "in-the-background"])
def test_the_scaler_is_saved_and_restored(on: On, tmp_path: Path, last: bool) -> None:
    on(growth_interval=3)
    trainer = Trainer.of(tmp_path)
    for number in range(3):
        trainer.step(number, OVERFLOW if number == 1 else 1.0)
    saved = tmp_path / "checkpoint-3"
    trainer.save(saved, last=last)
    found = ask(tmp_path, "roll")
    assert (found.part.scaler.state, found.outcome.verdict) == ("whole", "exact")
    resumed = Trainer.of(tmp_path)
    resumed.load(saved)
    own, other = trainer.strategy.scaler, resumed.strategy.scaler
    assert own.state_dict() == other.state_dict()
    assert other.get_scale() == FIRST / 2
    assert (other.counter.steps, other.counter.skipped) == (3, 1)
    assert same(trainer, resumed)
    assert resumed.moved == 3
    precision_shim.uninstall()
    without = Trainer.of(tmp_path)
    without.load(saved)
    rounded = [one.half() for one in trainer.parameters()]
    assert all(map(torch.equal, rounded, without.parameters()))
    assert not without.strategy.optimizer.state  # ROLL leaves the moments out
    assert ask(tmp_path, "roll").outcome.verdict == "starts anew"


@pytest.mark.usefixtures("torchs_own_check")
@pytest.mark.parametrize("overflows", [{1}, {0, 1, 2}], ids=["one", "all-before-the-save"])
@pytest.mark.parametrize("last", [True, False], ids=["last", "in-the-background"])
def test_a_resume_is_exact(on: On, tmp_path: Path, last: bool, overflows: set[int]) -> None:
    on(growth_interval=3)
    whole = Trainer.of(tmp_path)
    for number in range(6):
        whole.step(number, OVERFLOW if number in overflows else 1.0)
        if number == 2:
            whole.save(tmp_path / "saved", last=last)
    resumed = Trainer.of(tmp_path)
    resumed.load(tmp_path / "saved")
    found = [resumed.step(number) for number in range(3, 6)]
    assert found[-1]["skipped_steps"] == len(overflows)
    assert same(whole, resumed)
    assert all(map(torch.equal, whole.moments(), resumed.moments()))
    assert whole.strategy.scaler.state_dict() == resumed.strategy.scaler.state_dict()


@pytest.mark.usefixtures("torchs_own_check")
@pytest.mark.parametrize("last", [True, False], ids=["last", "in-the-background"])
def test_a_state_of_another_save_is_told(on: On, tmp_path: Path, last: bool) -> None:
    """A second save without the shim leaves the first save's scaler state in the directory."""
    saved = tmp_path / "saved"
    on()
    trainer = Trainer.of(tmp_path)
    trainer.step(0)
    trainer.save(saved, last=last)
    named = json.loads((saved / FILE_NAME).read_text())["files"]
    assert sorted(named) == ["dcp/.metadata", "dcp/__0_0.distcp"]
    precision_shim.uninstall()
    trainer.step(1)
    trainer.save(saved, last=last)
    on()
    with pytest.raises(precision_shim.ScalerCheckpointError, match="of another save"):
        Trainer.of(tmp_path).load(saved)


@pytest.mark.usefixtures("torchs_own_check")
def test_a_model_alone_is_saved_without_a_scaler(on: On, tmp_path: Path) -> None:
    on()
    trainer = Trainer.of(tmp_path, save_only_model=True)
    trainer.step(0)
    trainer.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "config.json").exists()
    assert not (tmp_path / "saved" / FILE_NAME).exists()


@pytest.mark.usefixtures("torchs_own_check")
def test_a_checkpoint_without_a_scaler_is_told(on: On, tmp_path: Path) -> None:
    Trainer.of(tmp_path).with_rolls_own_scaler().save(tmp_path / "saved")
    on()
    trainer = Trainer.of(tmp_path)
    with pytest.warns(precision_shim.PrecisionShimWarning, match="no loss scaler state"):
        trainer.load(tmp_path / "saved")


# -- installing and removing -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FSDP2TrainStrategy.train_step", "FSDP2StrategyBase._save"])
def test_a_version_without_a_symbol_is_refused_whole(
    on: On, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    refused_whole(on, monkeypatch, adapter, name)


@cases("roll", "fsdp")
def test_keys_without_effect(shim: Callable[..., Any], tmp_path: Path, case: Case) -> None:
    def build() -> Any:
        return Trainer.of(tmp_path, model_args=case.written)

    hold(case, build, frameworks="roll", export=False)
