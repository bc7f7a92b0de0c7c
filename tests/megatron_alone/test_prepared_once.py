"""Trainers that check for an overflow before Megatron's step, which checks again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim_adapters.megatron import metrics

from .training import OVERFLOW, SCALE, Trainer, fp16

On = Callable[..., Any]


def norms(trainer: Trainer, step: str, count: int = 3) -> list[float]:
    return [getattr(trainer, step)(number) for number in range(count)]


@pytest.mark.parametrize(("fp32_bucket", "parts"), [(True, 2), (False, 1)])
def test_the_norm_is_that_of_megatrons_own_step(
    on: On, one_process: Any, fp32_bucket: bool, parts: int
) -> None:
    build = fp16(fp32_bucket=fp32_bucket)
    right = norms(Trainer.of(build, parts), "plain")
    unscaled = norms(Trainer.of(fp16(scale=1.0), parts), "plain")
    unpatched = Trainer.of(build, parts)
    wrong = norms(unpatched, "asking")
    assert (wrong == right) == (not fp32_bucket)
    assert [one._growth_tracker for one in unpatched.scalers] == [6] * len(unpatched.scalers)
    if fp32_bucket:  # the gradients are divided by the scale twice
        assert wrong[0] == right[0] / SCALE
        # A norm that is not unscaled would be a thousand times as large.
        assert right == pytest.approx(unscaled, rel=0.5)
    on(features="fp16-scaling")  # the audit would refuse fp16 buckets under strict
    patched = Trainer.of(build, parts)
    assert norms(patched, "asking") == right
    assert [one._growth_tracker for one in patched.scalers] == [3] * len(patched.scalers)
    assert metrics(patched.optimizer) == {"loss_scale": SCALE, "skipped_steps": 0.0}


def test_a_skip_without_a_step_is_counted_once_and_ends(on: On, one_process: Any) -> None:
    on()
    trainer = Trainer.of(fp16(hysteresis=1), 2)
    trainer.asking(0)
    before = trainer.parameters()
    assert math.isnan(trainer.asking(1, OVERFLOW))
    assert all(map(torch.equal, before, trainer.parameters()))
    # The metric has the skipped step's scale, not the next step's.
    assert metrics(trainer.optimizer) == {"loss_scale": SCALE, "skipped_steps": 1.0}
    assert [float(one.scale) for one in trainer.scalers] == [SCALE / 2] * len(trainer.scalers)
    assert not math.isnan(trainer.asking(2))
    assert metrics(trainer.optimizer) == {"loss_scale": SCALE / 2, "skipped_steps": 1.0}


def test_overflows_in_a_row_end_with_our_error(on: On, one_process: Any) -> None:
    on()
    trainer = Trainer.of(fp16())
    for number in range(24):
        assert math.isnan(trainer.asking(number, OVERFLOW))
    with pytest.raises(precision_shim.LossScaleError, match="25 optimizer steps in a row"):
        trainer.asking(24, OVERFLOW)


def test_a_chain_asks_its_parts(on: On, one_process: Any) -> None:
    """After a step of one part of a chain, the chain checks for overflows anew."""
    on()
    trainer = Trainer.of(fp16(), 2)
    trainer.backward(0)
    assert not trainer.optimizer.prepare_grads()
    first, _ = trainer.optimizer.chained_optimizers
    assert first.step()[0]
    moved = first.grad_scaler._growth_tracker
    trainer.backward(1)
    trainer.optimizer.prepare_grads()
    assert first.grad_scaler._growth_tracker == moved + 1


def test_without_a_dynamic_scaler_every_call_goes_through(on: On, one_process: Any) -> None:
    """miles prepares the optimizers of several LoRA adapters without calling zero_grad."""
    from ..audit import builds

    on()
    trainer = Trainer.of(builds.Build(config={"clip_grad": 1.0}))
    trainer.backward(0)
    (one,) = trainer.optimizer.chained_optimizers
    prepared = []
    own = one._copy_model_grads_to_main_grads
    one._copy_model_grads_to_main_grads = lambda: (prepared.append(1), own())
    assert [one.prepare_grads(), one.prepare_grads()] == [False, False]
    assert len(prepared) == 2
