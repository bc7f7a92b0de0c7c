"""The adapter ``megatron`` on a model that no other adapter announces."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim.testing
from precision_shim.adapting import around
from precision_shim_adapters.megatron import adapter
from precision_shim_adapters.megatron.checkpoints.parameter_state import spread_parameters

from ..audit import builds
from ..every_framework.taken_out import Seams, namespaces, refused_whole
from ..testing.tiny_training import load, save
from .training import OVERFLOW, SCALE, Trainer, fp16

On = Callable[..., Any]
FIRST = 32768.0


def decisions() -> list[str]:
    return [
        f"{one.framework} {one.feature} {one.chosen}" for one in precision_shim.status().decisions
    ]


# -- the first scale ---------------------------------------------------------------------------


def test_megatrons_first_scale_costs_skips_and_ours_none(on: On, one_process: Any) -> None:
    unpatched = Trainer.of(fp16(scale=None))
    assert all(math.isnan(unpatched.plain(number)) for number in range(8))
    on()
    trainer = Trainer.of(fp16(scale=None))
    assert [float(one.scale) for one in trainer.scalers] == [FIRST]
    assert not any(math.isnan(trainer.plain(number)) for number in range(3))
    assert any(f"from {FIRST:g}" in one for one in decisions())


def test_a_scale_of_the_jobs_own_stays(on: On, one_process: Any) -> None:
    on(loss_scale_init=64.0, growth_interval=7)
    own, other = Trainer.of(fp16(loss_scale_window=5)), Trainer.of(fp16(scale=None))
    assert [(float(one.scale), one.growth_interval) for one in own.scalers] == [(SCALE, 5)]
    assert [(float(one.scale), one.growth_interval) for one in other.scalers] == [(64.0, 7)]


def test_a_static_scale_is_left_alone(on: On, one_process: Any) -> None:
    on()
    trainer = Trainer.of(fp16(loss_scale=128.0))
    assert any("static loss scale 128 is left alone" in one for one in decisions())
    trainer.backward(0)
    assert not trainer.optimizer.prepare_grads()
    right, _ = trainer.optimizer.get_grad_norm(), trainer.optimizer.prepare_grads()
    assert trainer.optimizer.get_grad_norm() == right / 128


# -- the DDP's check ---------------------------------------------------------------------------


@pytest.mark.parametrize("distributed", [True, False])
def test_an_overflow_reaches_the_scaler(
    on: On, one_process: Any, distributed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    configs = []
    own = DistributedDataParallelConfig.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs, check_for_nan_in_grad=True)
        configs.append(self)

    monkeypatch.setattr(DistributedDataParallelConfig, "__init__", make)
    build = replace(fp16(), distributed=distributed)
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)nan|inf"):
        Trainer.of(build).plain(0, OVERFLOW)
    on()
    trainer = Trainer.of(build)
    assert math.isnan(trainer.plain(0, OVERFLOW))
    assert configs[-1].check_for_nan_in_grad  # the caller's object is unchanged
    assert "megatron fp16-scaling check_for_nan_in_grad=False" in decisions()
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)nan|inf"):
        Trainer.of(builds.Build()).plain(0, math.nan)  # a bf16 model still checks for NaN


# -- a finished config -------------------------------------------------------------------------


def test_a_finished_config_is_checked_again(on: On, one_process: Any) -> None:
    """AReaL sets dtypes after the config's check: 14 bytes, or 12 if the shim checks again."""
    names = {**builds.AREAL.later, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "BFloat16"}

    def bytes_of(build: builds.Build) -> float:
        trainer = Trainer.of(build)
        trainer.plain(0)
        return precision_shim.testing.measure_bytes(trainer.chunks, trainer.optimizer).per_parameter

    assert bytes_of(builds.AREAL) == 14
    on()
    assert bytes_of(builds.AREAL) == 12
    assert bytes_of(replace(builds.AREAL, later=names)) == 12
    wrong = replace(builds.AREAL, later={**names, "exp_avg_dtype": "bf17"})
    with pytest.raises(precision_shim.DtypeError, match="exp_avg_dtype"):
        Trainer.of(wrong)


def test_it_adds_no_low_precision_states(on: On, one_process: Any) -> None:
    on(optimizer_states="follow-model")
    trainer = Trainer.of(builds.Build(config={"adam_beta2": 0.95}))
    trainer.plain(0)
    found = precision_shim.testing.measure_bytes(trainer.chunks, trainer.optimizer)
    assert found.per_parameter == 18
    assert decisions() == []


# -- a loss that is not scaled, or scaled twice ------------------------------------------------


def test_an_unscaled_loss_is_told(on: On, one_process: Any) -> None:
    """ROLL does not scale its loss, but its gradients are divided by the loss scale."""
    on()
    trainer = Trainer.of(fp16())
    trainer.plain(0)
    trainer = Trainer.of(fp16())
    trainer.backward(0, scaled=False)
    grads = [one.main_grad for one in trainer.chunks[0].parameters()]
    before = [one.clone() for one in grads]
    with pytest.warns(precision_shim.PrecisionShimWarning, match="the loss was not scaled"):
        trainer.optimizer.prepare_grads()
    assert all(torch.equal(one, own / SCALE) for one, own in zip(grads, before, strict=True))


def test_a_loss_scaled_twice_is_refused(on: On, one_process: Any) -> None:
    on()
    trainer = Trainer.of(fp16())
    own = trainer.optimizer.scale_loss
    trainer.optimizer.scale_loss = lambda loss: own(trainer.optimizer.get_loss_scale() * loss / 2)
    with pytest.raises(precision_shim.InconsistentPrecisionError, match="scaled twice"):
        trainer.backward(0)
    trainer.optimizer.scale_loss = lambda loss: own(loss * SCALE)  # a large loss weight
    trainer.backward(0)


# -- a load ------------------------------------------------------------------------------------


def test_a_rank_that_owns_no_parameter_loads(
    one_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows no device; NCCL, for which the ``all_reduce`` here stands, takes no CPU tensor."""

    def nccl(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")

    optimizer = Trainer.of(builds.Build()).optimizer.chained_optimizers[0]
    monkeypatch.setattr(optimizer, "model_param_group_index_map", {})
    monkeypatch.setattr(torch.distributed, "all_reduce", nccl)
    state: dict[str, Any] = {"param_state": {}}
    loaded = around(spread_parameters, lambda state_dict: "loaded", optimizer, (state,), {})
    assert loaded == "loaded"


# -- patched only if named, and removed --------------------------------------------------------


def test_without_the_name_nothing_is_patched(
    shim: Callable[..., Any], one_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("verl", "skyrl", "nemo_rl", "torchtitan"):  # ms-swift imports none of them
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = namespaces(adapter.SEAMS)
    status = shim(export=False)
    assert "megatron" not in status.frameworks
    assert not precision_shim.process.session.in_force("megatron", "fp16-scaling", "megatron")
    assert namespaces(adapter.SEAMS) == before


class TestSeams(Seams):
    pass


def test_a_version_without_a_symbol_is_refused_whole(
    on: On, one_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused_whole(on, monkeypatch, adapter, "prepare_grads")


# -- a training that is stopped and resumed ----------------------------------------------------


def test_a_training_that_was_stopped_goes_on_bit_for_bit(
    on: On, one_process: Any, tmp_path: Path
) -> None:
    on()

    def train(trainer: Trainer, numbers: range) -> None:
        for number in numbers:
            trainer.asking(number, OVERFLOW if number == 1 else 1.0)

    whole, half, resumed = (Trainer.of(fp16(loss_scale_window=3, hysteresis=1)) for _ in range(3))
    train(whole, range(6))
    train(half, range(3))
    save(half.chunks, half.optimizer, tmp_path, "dp_reshardable")
    load(resumed.chunks, resumed.optimizer, tmp_path)
    train(resumed, range(3, 6))
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    states = [one.state_dict() for one in (*whole.scalers, *resumed.scalers)]
    assert states[0] == states[1]
    assert float(states[0]["scale"]) == SCALE  # halved and grown again
