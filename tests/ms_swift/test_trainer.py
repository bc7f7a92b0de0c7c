"""ms-swift's Megatron trainer with the shim and without it: states, fp16, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim_adapters.ms_swift import adapter
from precision_shim_tools.testing import measure_bytes

from ..every_framework.checkpoint_doctor import verdict
from ..every_framework.taken_out import Seams, namespaces, refused_whole
from ..every_framework.without_effect import Case, cases, hold
from .cpu import OVERFLOW, arguments, parameters, scalers, train, trainer

On = Callable[..., Any]
FIRST = 32768.0
AWARE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


def bytes_of(made: Any) -> float:
    train(made, 0)
    found: float = measure_bytes(made.wrapped_models, made.optimizer).per_parameter
    return found


# -- states ----------------------------------------------------------------------------------------


def test_states_as_configured_and_as_asked_for_by_name(on: On, on_cpu: Any) -> None:
    build = [arguments(bf16=True), arguments(bf16=True, **AWARE)]
    build += [arguments(bf16=True, **AWARE, main_grads_dtype="bf16")]
    assert [bytes_of(trainer(on_cpu, one)) for one in build] == [18, 12, 10]
    on()
    assert [bytes_of(trainer(on_cpu, one)) for one in build] == [18, 12, 10]
    precision_shim.uninstall()
    on(optimizer_states="follow-model")
    assert bytes_of(trainer(on_cpu, arguments(bf16=True))) == 10


def test_an_fp32_bucket_that_ms_swift_itself_chooses_is_not_written(on_cpu: Any) -> None:
    bucket = {"accumulate_allreduce_grads_in_fp32": True, "main_grads_dtype": "fp32"}
    for bf16, written in ((True, None), (False, True)):
        assert adapter.read(arguments(bf16=bf16, **bucket)).bucket_in_fp32 is written


def test_bf16_trains_as_without_the_shim(on: On, on_cpu: Any) -> None:
    def run() -> list[torch.Tensor]:
        made = trainer(on_cpu, arguments(bf16=True))
        for number in range(3):
            train(made, number)
        return parameters(made)

    bare = run()
    on()
    assert all(map(torch.equal, bare, run()))


# -- fp16 ------------------------------------------------------------------------------------------


def test_norms_and_skips(on: On, on_cpu: Any) -> None:
    right = trainer(on_cpu, arguments())
    norms = [train(right, number)["grad_norm"] for number in range(3)]
    on()
    made = trainer(on_cpu, arguments(fp16=True))
    found = [train(made, number) for number in range(3)]
    # A norm that is not unscaled would be a thousand times as large.
    assert [one["grad_norm"] for one in found] == pytest.approx(norms, rel=0.5)
    assert [(one["loss_scale"], one["skipped_steps"]) for one in found] == [(FIRST, 0.0)] * 3
    assert [one._growth_tracker for one in scalers(made)] == [3]
    (model,) = made.wrapped_models
    assert model.buffers[0].grad_data.dtype is torch.float32
    before, steps = parameters(made), made.opt_param_scheduler.num_steps
    skipped = train(made, 3, OVERFLOW)
    assert math.isnan(skipped["grad_norm"])
    assert skipped["skipped_steps"] == 1.0
    assert all(map(torch.equal, before, parameters(made)))
    assert made.opt_param_scheduler.num_steps == steps  # as ms-swift has it
    assert made.state.iteration == 4
    assert not math.isnan(train(made, 4)["grad_norm"])


def test_the_weighting_of_tokens_is_no_loss_scale(on: On, on_cpu: Any) -> None:
    on(loss_scale_init=64.0)
    made = trainer(on_cpu, arguments(fp16=True, loss_scale="ignore_empty_think"))
    assert [float(one.scale) for one in scalers(made)] == [64.0]


def test_a_training_that_was_stopped_goes_on_bit_for_bit(
    on: On, on_cpu: Any, tmp_path: Path
) -> None:
    on(growth_interval=3)
    saved = arguments(fp16=True, output_dir=str(tmp_path))
    (tmp_path / "args.json").write_text("{}")

    def run(made: Any, numbers: range) -> None:
        for number in numbers:
            train(made, number, OVERFLOW if number in (1, 2) else 1.0)

    whole, half = trainer(on_cpu, arguments(fp16=True)), trainer(on_cpu, saved)
    run(whole, range(7))
    run(half, range(4))
    half.save_checkpoint()
    assert verdict(tmp_path, "ms-swift") == "exact"
    again = {"mcore_model": str(tmp_path / "checkpoint-4"), "finetune": False, "model": None}
    resumed = trainer(on_cpu, arguments(fp16=True, **again))
    assert resumed.state.iteration == 4
    run(resumed, range(4, 7))
    assert all(map(torch.equal, parameters(whole), parameters(resumed)))
    states = [one.state_dict() for one in (*scalers(whole), *scalers(resumed))]
    assert states[0] == states[1]


# -- other adapters, installing and removing -------------------------------------------------------


def test_without_the_name_or_the_shim_nothing_is_patched(
    shim: Callable[..., Any], on_cpu: Any
) -> None:
    before = namespaces(adapter.SEAMS)
    shim(frameworks="verl,torchtitan", export=False)
    assert namespaces(adapter.SEAMS) == before
    trainer(on_cpu, arguments(bf16=True))
    assert not precision_shim.status().decisions


class TestSeams(Seams):
    pass


def test_a_version_without_a_symbol_is_refused_whole(
    on: On, on_cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused_whole(on, monkeypatch, adapter, "train_step")


@cases("ms-swift", "megatron")
def test_keys_without_effect(on_cpu: Any, shim: Callable[..., Any], case: Case) -> None:
    asked = dict(case.written)
    hold(case, lambda: trainer(on_cpu, arguments(**asked)), frameworks="ms-swift", export=False)
