"""slime's and miles' own steps on Megatron, with the shim on and off."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim_adapters.miles import adapter as miles
from precision_shim_adapters.slime import adapter as slime
from precision_shim_tools.testing import measure_bytes

from ..every_framework.checkpoint_doctor import verdict
from ..every_framework.taken_out import Seams, refused_whole
from ..every_framework.without_effect import CASES as KEYS
from ..every_framework.without_effect import Case, hold
from ..testing.tiny_training import load, save
from .driving import OVERFLOW, SCALE, Trainer, skipped

On = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("one_process")
FP16 = ("--fp16", f"--initial-loss-scale={SCALE:.0f}")
FP32_BUCKET = "--accumulate-allreduce-grads-in-fp32"
CASES = [one for one in KEYS if one.framework in ("slime", "miles")]
ADAPTERS = {"slime": slime, "miles": miles}


def norms(trainer: Trainer, count: int = 3) -> list[float]:
    return [trainer.norm(number) for number in range(count)]


def trackers(trainer: Trainer) -> list[int]:
    return [one._growth_tracker for one in trainer.scalers]


def decisions() -> list[str]:
    return [
        f"{one.subject} {one.feature} {one.chosen}" for one in precision_shim.status().decisions
    ]


@pytest.mark.parametrize("bucket", [(), (FP32_BUCKET,)], ids=["fp16-bucket", "fp32-bucket"])
def test_gradients_are_unscaled_once(on: On, name: str, bucket: tuple[str, ...]) -> None:
    right = norms(Trainer.of(name, "--fp16", "--initial-loss-scale=1", FP32_BUCKET))
    unpatched = Trainer.of(name, *FP16, *bucket)
    wrong = norms(unpatched)
    if bucket:
        assert wrong[0] == pytest.approx(right[0] / SCALE, rel=0.5)
    assert trackers(unpatched) == [6]
    on()
    patched = Trainer.of(name, *FP16, *bucket)
    assert norms(patched) == pytest.approx(right, rel=0.5)
    assert trackers(patched) == [3]


def test_a_skip_is_counted_and_reported(on: On, name: str) -> None:
    on()
    trainer = Trainer.of(name, *FP16, "--hysteresis=1")
    assert trainer.step(0)[0].items() >= {"loss_scale": SCALE, "skipped_steps": 0.0}.items()
    assert skipped(trainer, 1)
    found, norm = trainer.step(2)
    assert found.items() >= {"loss_scale": SCALE / 2, "skipped_steps": 1.0}.items()
    assert "loss" in found
    assert math.isfinite(norm)


def test_bf16_is_as_without_the_shim(on: On, name: str) -> None:
    trainers = [Trainer.of(name)]
    on()
    trainers.append(Trainer.of(name))
    found = [[trainer.step(number) for number in range(3)] for trainer in trainers]
    assert found[0] == found[1]
    assert all(map(torch.equal, *(trainer.parameters() for trainer in trainers)))
    bytes_of = [measure_bytes(one.chunks, one.optimizer).per_parameter for one in trainers]
    assert bytes_of == [18, 18]


def test_states_follow_the_model_where_that_is_asked(on: On, name: str) -> None:
    on(optimizer_states="follow-model")
    trainer = Trainer.of(name, "--adam-beta2=0.95", "--grad-reduce-in-bf16")
    trainer.norm(0)
    assert measure_bytes(trainer.chunks, trainer.optimizer).per_parameter == 10
    assert any(one.startswith("actor bf16-dispatch") for one in decisions())


def test_what_reads_or_lacks_states_keeps_them_fp32(on: On, name: str) -> None:
    on(optimizer_states="follow-model")
    own = {"use_stateless_adam": True, "no_save_optim": True}
    if name == "miles":
        own = {"save_local_weight_checksum": True}
    trainer = Trainer.of(name, "--adam-beta2=0.95", **own)
    (part,) = trainer.optimizer.chained_optimizers
    assert not part.config.use_precision_aware_optimizer
    (blocker,) = ADAPTERS[name].read(trainer.args, "actor").blockers
    assert any(blocker in one.because for one in precision_shim.status().decisions)


def test_flags_that_megatron_sets_are_not_asked(name: str) -> None:
    requested = ADAPTERS[name].read(Trainer.of(name).args, "critic")
    assert not {"fp16", "bf16", "params_dtype", "exp_avg_dtype"} & set(requested.asked)
    assert requested.asked["lr"] == 0.01
    assert (requested.subject, requested.bucket_in_fp32) == ("critic", True)
    written = Trainer.of(name, "--grad-reduce-in-bf16").args
    assert ADAPTERS[name].read(written, "actor").bucket_in_fp32 is False


def test_a_resume_is_exact(on: On, name: str, tmp_path: Path) -> None:
    on()
    flags = (*FP16, "--loss-scale-window=3", "--hysteresis=1")

    def train(trainer: Trainer, numbers: range) -> None:
        for number in numbers:
            trainer.step(number, OVERFLOW if number == 1 else 1.0)

    whole, half, resumed = (Trainer.of(name, *flags) for _ in range(3))
    train(whole, range(6))
    train(half, range(3))
    step = tmp_path / "iter_0000003"  # as Megatron's training names it
    step.mkdir()
    save(half.chunks, half.optimizer, step, "dp_reshardable")
    assert verdict(tmp_path, name) == "exact"
    load(resumed.chunks, resumed.optimizer, step)
    resumed.scheduler.load_state_dict(half.scheduler.state_dict())
    train(resumed, range(3, 6))
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    assert whole.scalers[0].state_dict() == resumed.scalers[0].state_dict()


def test_miles_without_an_optimizer(on: On, name: str) -> None:
    if name != "miles":
        pytest.skip("only miles trains without an optimizer")
    on()
    trainer = Trainer.of(name, *FP16, debug_disable_optimizer=True)
    assert trainer.optimizer is None
    found, norm = trainer.step(0)
    assert set(found) == {"loss"}
    assert norm == 0.0


# -- installing and removing -------------------------------------------------------------------


class TestSeams(Seams):
    pass


def test_a_version_without_a_symbol_is_refused_whole(
    on: On, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused_whole(on, monkeypatch, ADAPTERS[name], "train_one_step")


@pytest.mark.parametrize("case", CASES, ids=lambda one: f"{one.framework} {one.told[0]}")
def test_keys_without_effect(name: str, shim: Callable[..., Any], case: Case) -> None:
    if case.framework != name:
        pytest.skip(f"a key of {case.framework}")
    flags = [word for pair in case.written.items() for word in pair if pair[0][:2] == "--" and word]
    own = {key: value for key, value in case.written.items() if key[:2] != "--"}
    hold(case, lambda: Trainer.of(name, *flags, **own), frameworks=name, export=False)
