"""float16 on real Megatron buffers: an overflow skips the step, and the skip is reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from packaging.version import Version

from precision_shim.errors import InconsistentPrecisionError, PrecisionShimWarning, SettingsError

from ..support import NEMO_RL, batch, loss_for, nll_loss
from .support import FP16, POLICY, VALUE

Make = Callable[..., AbstractContextManager[Any]]

TOO_MUCH = {**FP16, "initial_loss_scale": 2.0**30, "hysteresis": 1}
"""An initial loss scale at which the tiny model's gradients overflow in fp16."""

ROLES = [pytest.param(POLICY, id="policy")]
if Version("0.7") <= NEMO_RL:
    ROLES.append(pytest.param(VALUE, id="value"))


def loss_of(target: str) -> Any:
    return loss_for("value") if target == VALUE else nll_loss()


def parameters(made: Any) -> torch.Tensor:
    return torch.cat([one.detach().flatten().clone() for one in made.model.parameters()])


def scaler(made: Any) -> Any:
    return getattr(made.optimizer, "chained_optimizers", [made.optimizer])[0].grad_scaler


@pytest.mark.parametrize("target", ROLES)
def test_an_overflow_is_skipped_counted_and_reported(worker: Make, shim: Any, target: str) -> None:
    shim()
    with worker("float16", target=target, optimizer=TOO_MUCH) as made:
        assert made.megatron_cfg.ddp.check_for_nan_in_grad, "the worker's config is the worker's"
        before = parameters(made)
        skipped = 0
        for seed in range(60):
            scale = float(made.optimizer.get_loss_scale())
            result = made.train(batch(seed=seed), loss_of(target))
            metrics = result["all_mb_metrics"]
            assert metrics["loss_scale"] == [scale]
            assert math.isfinite(float(result["global_loss"]))
            if not math.isnan(float(result["grad_norm"])):
                break
            skipped += 1
            assert metrics["skipped_steps"] == [skipped]
            assert float(made.optimizer.get_loss_scale()) == scale / 2
            assert torch.equal(parameters(made), before)
        assert 2 < skipped < 25
        assert metrics["skipped_steps"] == [skipped]
        assert not torch.equal(parameters(made), before)
        assert float(result["grad_norm"]) < 100, "the norm is of unscaled gradients"


def test_an_evaluation_steps_and_reports_nothing(worker: Make, shim: Any) -> None:
    shim()
    with worker("float16", optimizer=TOO_MUCH) as made:
        made.train(batch(), nll_loss())
        scale = float(made.optimizer.get_loss_scale())
        result = made.train(batch(), nll_loss(), eval_mode=True)
        assert not {"loss_scale", "skipped_steps"} & set(result["all_mb_metrics"])
        assert float(made.optimizer.get_loss_scale()) == scale


def test_variables_and_the_configs_block_reach_the_scaler(worker: Make, shim: Any) -> None:
    shim(settings={"loss_scale_init": 64, "growth_interval": 7, "growth_factor": 3})
    with worker("float16", optimizer=FP16) as made:
        found = scaler(made)
        assert (found.scale.item(), found.growth_interval, found.growth_factor) == (64, 7, 3)
    with worker("float16", optimizer=FP16, precision_shim={"growth_interval": 9}) as made:
        found = scaler(made)
        assert (found.scale.item(), found.growth_interval) == (64, 9)
    with worker("float16", optimizer={**FP16, "loss_scale_window": 11}) as made:
        assert scaler(made).growth_interval == 11, "the optimizer's own key is the user's"


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"growth_factor": 3}, "growth_factor"),
        ({"loss_scale_init": 0.5}, r"\.precision_shim: loss_scale_init=0\.5 is below min"),
    ],
)
def test_a_block_that_makes_no_sense_is_refused(
    worker: Make, shim: Any, block: dict[str, Any], told: str
) -> None:
    shim()
    with (
        pytest.raises(SettingsError, match=told),
        worker("float16", optimizer=FP16, precision_shim=block),
    ):
        pass


def test_a_static_loss_scale_is_left_alone(worker: Make, shim: Any) -> None:
    shim()
    with worker("float16", optimizer={**FP16, "loss_scale": 128.0}) as made:
        assert made.model.ddp_config.check_for_nan_in_grad
        result = made.train(batch(), nll_loss())
        assert "loss_scale" not in result["all_mb_metrics"]
        assert math.isfinite(float(result["grad_norm"]))


@pytest.mark.skipif(Version("0.7") > NEMO_RL, reason="until 0.6 it sets none")
def test_the_scales_of_auxiliary_losses_have_the_loss_scale_in_them(
    worker: Make, shim: Any
) -> None:
    """Megatron from 0.19 on scales auxiliary losses by NeMo-RL's functions; 0.18 does not."""

    class Looking:
        def __init__(self, made: Any) -> None:
            self.inner, self.config, self.seen = nll_loss(), made.model.config, []

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            scales = (self.config.moe_grad_scale_func, self.config.mtp_grad_scale_func)
            self.seen.append([float(scale()) for scale in scales])
            return self.inner(*args, **kwargs)

    def look(optimizer: dict[str, Any]) -> list[list[float]]:
        with worker("float16", optimizer=optimizer) as made:
            looking = Looking(made)
            made.train(batch(), looking)
            assert made.model.config.moe_grad_scale_func is None
            return looking.seen

    optimizer = {**FP16, "initial_loss_scale": 64.0}
    plain = look(optimizer)
    shim()
    assert look(optimizer) == [[64 * one for one in scales] for scales in plain]
    assert look({**FP16, "loss_scale": 64.0}) == plain


# -- gradients in fp16 under the precision-aware optimizer -------------------------------------


AWARE = {**FP16, "use_precision_aware_optimizer": True}
FP16_BUCKET = {"grad_reduce_in_fp32": False}
"""The bucket's key in NeMo-RL's YAML files, which also set ``AWARE``'s last key."""


def test_such_a_pair_is_refused_by_name(worker: Make, shim: Any, fused_adam: str) -> None:
    shim()
    with (
        pytest.warns(PrecisionShimWarning, match="another dtype"),
        pytest.raises(InconsistentPrecisionError, match="grad_reduce_in_fp32: true"),
        worker("float16", optimizer=AWARE, ddp=FP16_BUCKET),
    ):
        pass


def test_alignment_trains_it(worker: Make, shim: Any, fused_adam: str) -> None:
    shim(settings={"grad_bucket": "align"})
    with worker("float16", optimizer=AWARE, ddp=FP16_BUCKET) as made:
        before = parameters(made)
        result = made.train(batch(), nll_loss())
        assert math.isfinite(float(result["grad_norm"]))
        assert not torch.equal(parameters(made), before)
