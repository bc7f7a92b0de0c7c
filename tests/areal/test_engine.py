"""AReaL's MegatronEngine with the shim and without it: dtypes, states, fp16, checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim_adapters.areal import adapter
from precision_shim_tools.checkpoint.prediction import Here
from precision_shim_tools.checkpoint.report import examine
from precision_shim_tools.testing import measure_bytes

from ..every_framework.taken_out import Seams, refused_whole
from ..every_framework.without_effect import Case, cases, hold
from ..testing.tiny_training import load, save
from .cpu import OVERFLOW, config, engine, parameters, scalers, train

On = Callable[..., Any]
ADAM_BF16 = {"type": "adam_bf16"}
FP16 = {"initial_loss_scale": 1024.0}
FIRST = 32768.0
SHARDING = "dp_reshardable"


def bytes_of(made: Any) -> float:
    train(made, 0)
    found: float = measure_bytes(made.model, made.optimizer).per_parameter
    return found


# -- dtype names and states ----------------------------------------------------------------------


def test_dtype_names(on: On, on_cpu: Any) -> None:
    names = {"exp_avg_dtype": "bf16", "use_precision_aware_optimizer": True}
    with pytest.raises(AttributeError, match="bf16"):
        engine(on_cpu, config(**names))
    on()
    asked = config(**names, exp_avg_sq_dtype=" torch.FLOAT32 ")
    before = copy.deepcopy(asked)
    made = engine(on_cpu, asked)
    assert asked == before  # the caller's object
    own = made.optimizer.chained_optimizers[0].config
    assert (own.exp_avg_dtype, own.exp_avg_sq_dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(precision_shim.DtypeError, match=r"areal 1\.0\.4.*megatron\.exp_avg_dtype"):
        engine(on_cpu, config(exp_avg_dtype="bf17"))


def test_adam_bf16_holds_what_its_config_says(on: On, on_cpu: Any) -> None:
    assert bytes_of(engine(on_cpu, config(optimizer=ADAM_BF16))) == 14
    on()
    assert bytes_of(engine(on_cpu, config(optimizer=ADAM_BF16))) == 12
    assert bytes_of(engine(on_cpu, config())) == 18  # without a request the shim adds no field
    moments = {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}
    assert bytes_of(engine(on_cpu, config(optimizer=ADAM_BF16, **moments))) == 10  # the bucket, too


@pytest.mark.parametrize(("name", "value"), [("hysteresis", 0), ("initial_loss_scale", 1e39)])
def test_numbers_that_megatrons_scaler_refuses(
    on: On, on_cpu: Any, name: str, value: float
) -> None:
    on()
    with pytest.raises(precision_shim.SettingsError, match=rf"areal 1\.0\.4.*{name}=.*above 0"):
        engine(on_cpu, config("float16", optimizer={name: value}))


def test_fp16_gradients_that_are_not_clipped(on: On, on_cpu: Any) -> None:
    on()
    asked = {"optimizer": {"gradient_clipping": 0.0}, "ddp": {"grad_reduce_in_fp32": False}}
    with pytest.warns(precision_shim.PrecisionShimWarning, match="another dtype"):
        made = engine(on_cpu, config("float16", use_precision_aware_optimizer=True, **asked))
    assert train(made, 0)["update_successful"] == 1.0


def test_adam_bf16_trains_in_bf16(on_cpu: Any) -> None:
    """What the comparison with the rollout says of it (``areal_sides``)."""
    made = engine(on_cpu, config("float16", optimizer=ADAM_BF16))
    assert {one.dtype for one in made.model[0].parameters()} == {torch.bfloat16}


def test_what_was_asked_for_by_name_follows_the_model(on: On, on_cpu: Any) -> None:
    on(optimizer_states="follow-model")
    assert bytes_of(engine(on_cpu, config(optimizer={"beta2": 0.95}))) == 10
    kept = config(optimizer={"beta2": 0.95}, ddp={"grad_reduce_in_fp32": False})
    assert bytes_of(engine(on_cpu, kept)) == 10


def test_a_checkpoint_is_read_without_the_shim(on: On, on_cpu: Any, tmp_path: Path) -> None:
    on()
    made = engine(on_cpu, config(optimizer=ADAM_BF16))
    train(made, 0)
    save(made.model, made.optimizer, tmp_path / "shim", SHARDING)
    train(made, 1)
    precision_shim.uninstall()
    bare = engine(on_cpu, config(optimizer=ADAM_BF16))
    load(bare.model, bare.optimizer, tmp_path / "shim")
    train(bare, 1)
    assert all(map(torch.equal, parameters(made), parameters(bare)))
    save(bare.model, bare.optimizer, tmp_path / "bare", SHARDING)
    on()
    back = engine(on_cpu, config(optimizer=ADAM_BF16))
    load(back.model, back.optimizer, tmp_path / "shim")
    train(back, 1)
    assert all(map(torch.equal, parameters(made), parameters(back)))
    with pytest.raises(precision_shim.CheckpointLayoutError, match="start from the model's"):
        load(back.model, back.optimizer, tmp_path / "bare")


# -- fp16 ----------------------------------------------------------------------------------------


def test_norms_and_skips(on: On, on_cpu: Any) -> None:
    """AReaL does not count skipped steps; too high a first scale skips the first steps."""
    bare = engine(on_cpu, config("float16", optimizer=FP16))
    # AReaL does not pass its initial_loss_scale to Megatron
    assert math.isnan(train(bare, 0)["grad_norm"])
    right = engine(on_cpu, config("float32"))
    norms = [train(right, number)["grad_norm"] for number in range(3)]
    on()
    made = engine(on_cpu, config("float16", optimizer=FP16))
    found = [train(made, number) for number in range(3)]
    # A norm that is not unscaled would be a thousand times as large.
    assert [one["grad_norm"] for one in found] == pytest.approx(norms, rel=0.5)
    assert [one["update_successful"] for one in found] == [1.0] * 3
    assert [(one["loss_scale"], one["skipped_steps"]) for one in found] == [(1024.0, 0.0)] * 3
    assert [one._growth_tracker for one in scalers(made)] == [3]
    before = parameters(made)
    skipped = train(made, 3, OVERFLOW)
    assert math.isnan(skipped["grad_norm"])
    assert (skipped["update_successful"], skipped["skipped_steps"]) == (0.0, 1.0)
    assert all(map(torch.equal, before, parameters(made)))


def test_the_first_scale_is_ours_where_nobody_wrote_one(on: On, on_cpu: Any) -> None:
    on()
    (one,) = scalers(engine(on_cpu, config("fp16")))
    assert (float(one.scale), one.growth_interval) == (FIRST, 1000)
    asked = {"initial_loss_scale": 8.0, "loss_scale_window": 7, "hysteresis": 1}
    (other,) = scalers(engine(on_cpu, config("fp16", optimizer=asked)))
    assert (float(other.scale), other.growth_interval, other.hysteresis) == (8.0, 7, 1)


def test_the_users_check_of_gradients_stays(on: On, on_cpu: Any) -> None:
    on()
    checked = config("float16", ddp={"check_for_nan_in_grad": True})
    with pytest.warns(precision_shim.PrecisionShimWarning, match="check_for_nan_in_grad=True"):
        made = engine(on_cpu, checked)
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)nan|inf"):
        train(made, 0, OVERFLOW)


@pytest.mark.parametrize("place", ["norm", "update"])
def test_after_an_exception_the_next_gradients_are_unscaled_once(
    on: On, on_cpu: Any, place: str
) -> None:
    """An exception ends a step after its gradients are unscaled, and another batch follows."""
    on()
    asked = config("float16", optimizer=FP16)
    right, made = engine(on_cpu, asked), engine(on_cpu, asked)
    figures = train(right, 0)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("interrupted")

    owner, name = (made.optimizer, "get_grad_norm")
    if place == "update":
        owner, name = (made.optimizer.chained_optimizers[0].optimizer, "step")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="interrupted"):
            train(made, 0)
    assert train(made, 0) == figures
    assert all(map(torch.equal, parameters(right), parameters(made)))


def test_a_scaler_that_is_loaded_after_an_exception_stays(
    on: On, on_cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on()
    made = engine(on_cpu, config("float16", optimizer=FP16))
    with monkeypatch.context() as patch:
        patch.setattr(made.optimizer, "get_grad_norm", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(made, 0)
    (scaler,) = scalers(made)
    scaler.load_state_dict({**scaler.state_dict(), "scale": torch.tensor([64.0])})
    assert train(made, 1)["loss_scale"] == 64.0


def test_a_training_that_was_stopped_goes_on_bit_for_bit(
    on: On, on_cpu: Any, tmp_path: Path
) -> None:
    on()
    asked = config("float16", optimizer={**FP16, "loss_scale_window": 3, "hysteresis": 1})

    def run(made: Any, numbers: range) -> None:
        for number in numbers:
            train(made, number, OVERFLOW if number == 1 else 1.0)

    whole, half, resumed = (engine(on_cpu, asked) for _ in range(3))
    run(whole, range(6))
    run(half, range(3))
    step = tmp_path / "epoch0epochstep2globalstep2"  # as AReaL's saver names it
    step.mkdir()
    save(half.model, half.optimizer, step, SHARDING)
    (found,) = examine(tmp_path, Here.now())
    assert (found.part.framework, found.outcome.verdict) == ("areal", "exact")
    load(resumed.model, resumed.optimizer, step)
    run(resumed, range(3, 6))
    assert all(map(torch.equal, parameters(whole), parameters(resumed)))
    states = [one.state_dict() for one in (*scalers(whole), *scalers(resumed))]
    assert states[0] == states[1]


# -- other adapters, installing and removing -----------------------------------------------------


class TestSeams(Seams):
    pass


def test_a_version_without_a_symbol_is_refused_whole(
    on: On, on_cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused_whole(on, monkeypatch, adapter, "optimizer_step")


@cases("areal", "megatron")
def test_keys_without_effect(on_cpu: Any, shim: Callable[..., Any], case: Case) -> None:
    def build() -> Any:
        asked = config(optimizer=case.written.get("optimizer"))
        for key, value in case.written.items():
            if key != "optimizer":
                setattr(asked, key, value)
        return engine(on_cpu, asked)

    hold(case, build, frameworks="areal", export=False)
