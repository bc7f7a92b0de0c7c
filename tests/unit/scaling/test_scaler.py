"""The loss scaler in one process: gradients, skips, bounds, counters."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from precision_shim.errors import LossScaleError
from precision_shim.scaling import LossScaler, ScalerSettings, SkipCounter
from precision_shim.scaling.scaler import MAX_SCALE


def scaler(**settings):
    return LossScaler(ScalerSettings(**settings), device="cpu")


def one_parameter(value=1.0, lr=1.0, dtype=torch.float32):
    parameter = torch.nn.Parameter(torch.full((2,), value, dtype=dtype))
    return parameter, torch.optim.SGD([parameter], lr=lr)


def train(scaling, parameter, optimizer, weight=1.0):
    optimizer.zero_grad()
    loss = (parameter * weight).sum()
    scaling.attach(loss)
    loss.backward()
    scaling.unscale_once(optimizer)
    scaling.step(optimizer)
    scaling.update()
    return loss


# -- the hook --------------------------------------------------------------------------------


@given(
    scale=st.one_of(
        st.integers(-20, 40).map(lambda exponent: 2.0**exponent),
        st.floats(2.0**-10, 2.0**30, width=32),
    ),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    # Before scaling, a framework multiplies its loss by dp x cp or divides it by the accumulation.
    factor=st.sampled_from([1.0, 3.0, 0.1, 1 / 7]),
    seed=st.integers(0, 99),
)
def test_the_hooks_gradients_are_those_of_scale(scale, dtype, factor, seed):
    def gradients(scaled):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 1))
        model.to(dtype)
        scaling = scaler(init_scale=scale)
        loss = model(torch.randn(3, 5).to(dtype)).square().mean() * factor
        if scaled == "hook":
            value = loss.item()
            scaling.attach(loss)
            loss.backward()
            assert loss.item() == value or math.isnan(value)  # what is reported stays unscaled
        else:
            scaling.scale(loss).backward()
        return [parameter.grad.view(torch.uint8) for parameter in model.parameters()]

    for ours, theirs in zip(gradients("hook"), gradients("scale"), strict=True):
        assert torch.equal(ours, theirs)


def test_a_loss_in_eval_mode_is_left_alone():
    parameter, _ = one_parameter()
    scaling = scaler()
    with torch.no_grad():
        loss = parameter.sum()
    scaling.attach(loss)
    assert loss._backward_hooks is None
    assert scaling.counter == SkipCounter()


def test_a_hook_under_a_graph_is_the_mean_of_all_micro_batches():
    """Three backward calls accumulate, one unscale follows: the gradient is as without scaling."""
    parameter, optimizer = one_parameter(lr=0.5)
    scaling = scaler(init_scale=1024.0)
    for weight in (1.0, 2.0, 4.0):
        loss = (parameter * weight).sum() / 3
        scaling.attach(loss)
        loss.backward()
    scaling.unscale_once(optimizer)
    scaling.unscale_once(optimizer)  # an adapter may enter both clip and step
    assert torch.allclose(parameter.grad, torch.full((2,), 7 / 3))
    scaling.step(optimizer)
    scaling.update()
    assert torch.allclose(parameter.detach(), torch.full((2,), 1 - 0.5 * 7 / 3))


# -- steps -----------------------------------------------------------------------------------


def test_it_is_a_sharded_grad_scaler_and_does_what_that_does():
    """Compares our scaler with torch's, step by step over overflows and growth."""
    mine, other = one_parameter(), one_parameter()
    ours = scaler(init_scale=2.0**10, growth_interval=3)
    theirs = torch.amp.GradScaler(device="cpu", init_scale=2.0**10, growth_interval=3)
    assert isinstance(ours, ShardedGradScaler)
    for weight in (1, 1, 1, math.inf, 1, 1, math.nan, math.nan, 1, 1, 1, 1, 1):
        train(ours, *mine, weight)
        other[1].zero_grad()
        theirs.scale((other[0] * weight).sum()).backward()
        theirs.step(other[1])
        theirs.update()
        assert ours.get_scale() == theirs.get_scale()
        assert ours._get_growth_tracker() == theirs._get_growth_tracker()
        assert torch.equal(mine[0], other[0])
    assert (ours.counter.steps, ours.counter.skipped, ours.counter.in_row) == (13, 3, 0)


def test_the_first_skip_is_told_and_then_every_power_of_ten(capsys):
    parameter, optimizer = one_parameter()
    scaling = scaler(init_scale=2.0**16)
    train(scaling, parameter, optimizer)
    for _ in range(11):
        train(scaling, parameter, optimizer, math.inf)
    first, tenth = capsys.readouterr().err.splitlines()
    assert "optimizer step 2 was skipped" in first
    assert "loss scale 65536, then 32768; normal in fp16" in first
    assert "optimizer step 11 was skipped" in tenth
    assert tenth.endswith("(skipped so far: 10)")


def test_fp16_gradients_are_unscaled_without_a_process_group():
    parameter, optimizer = one_parameter(dtype=torch.float16)
    scaling = scaler(init_scale=256.0)
    train(scaling, parameter, optimizer, 0.5)
    assert parameter.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_optimizer_skips_too_and_is_counted(fused):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], fused=fused, lr=0.1)
    scaling = scaler(init_scale=16.0)
    train(scaling, parameter, optimizer, math.inf)
    assert parameter.tolist() == [1.0, 1.0]
    assert (scaling.counter.steps, scaling.counter.skipped) == (1, 1)
    train(scaling, parameter, optimizer)
    assert parameter.tolist() != [1.0, 1.0]
    assert (scaling.counter.steps, scaling.counter.skipped) == (2, 1)
    assert scaling.loss_scale == 8.0


class Capturable(torch.optim.SGD):
    """An optimizer that uses a scaler as TransformerEngine's ``capturable`` FusedAdam does."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, grad_scaler=None):
        if grad_scaler is not None:
            overflow = sum(grad_scaler._check_inf_per_device(self).values())
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad /= grad_scaler.get_scale()
            if overflow:
                return None
        return super().step(closure)


def test_an_optimizer_that_would_unscale_itself_gets_unscaled_gradients_once():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Capturable([parameter], lr=0.5)
    scaling = scaler(init_scale=16.0)
    train(scaling, parameter, optimizer, math.inf)
    train(scaling, parameter, optimizer)
    assert parameter.tolist() == [0.5, 0.5]
    assert (scaling.counter.steps, scaling.counter.skipped) == (2, 1)
    assert optimizer._step_supports_amp_scaling
    assert "_step_supports_amp_scaling" not in vars(optimizer)


def test_two_optimizers_make_one_step():
    (one, first), (two, second) = one_parameter(), one_parameter()
    scaling = scaler(init_scale=16.0)
    for weight, skipped in ((math.inf, 1), (1.0, 1)):
        for parameter, optimizer, factor in ((one, first, weight), (two, second, 1.0)):
            optimizer.zero_grad()
            loss = (parameter * factor).sum()
            scaling.attach(loss)
            loss.backward()
        scaling.step(first)
        scaling.step(second)
        scaling.update()
        assert scaling.counter.skipped == skipped
    assert scaling.counter.steps == 2


def test_a_rank_without_a_loss_can_still_unscale_and_step():
    """With only dummy micro-batches a rank has no loss and no gradient, but takes the step."""
    _, optimizer = one_parameter()
    scaling = scaler(init_scale=16.0)
    scaling.unscale_once(optimizer)
    scaling.step(optimizer)
    scaling.update()
    assert scaling.get_scale() == 16.0


# -- bounds ----------------------------------------------------------------------------------


def test_the_scale_never_falls_below_its_minimum_and_endless_skips_end():
    parameter, optimizer = one_parameter()
    scaling = scaler(init_scale=8.0, min_scale=1.0, max_skips=25)
    for _ in range(24):
        train(scaling, parameter, optimizer, math.nan)
        assert scaling.get_scale() >= 1.0
    with pytest.raises(
        LossScaleError, match=r"25 optimizer steps in a row .* step 25 .* scale 1\b"
    ):
        train(scaling, parameter, optimizer, math.nan)
    assert scaling.get_scale() == 1.0
    assert parameter.tolist() == [1.0, 1.0]


def test_gradients_of_zero_do_not_drive_the_scale_to_inf():
    """GRPO groups without a reward difference have zero gradients, for any number of steps."""
    parameter, optimizer = one_parameter()
    scaling = scaler(init_scale=2.0**120, growth_interval=1)
    for _ in range(20):
        train(scaling, parameter, optimizer, 0.0)
    assert scaling.get_scale() == MAX_SCALE
    assert scaling.counter.skipped == 0


def test_a_taken_step_begins_the_row_anew():
    parameter, optimizer = one_parameter()
    scaling = scaler(max_skips=3)
    for weight in (math.nan, math.nan, 1.0, math.nan, math.nan):
        train(scaling, parameter, optimizer, weight)
    assert (scaling.counter.skipped, scaling.counter.in_row) == (4, 2)
    with pytest.raises(LossScaleError):
        train(scaling, parameter, optimizer, math.nan)


def test_a_failed_optimizer_step_is_not_hidden():
    parameter, optimizer = one_parameter()
    optimizer.step = lambda: 1 / 0
    parameter.sum().backward()
    with pytest.raises(ZeroDivisionError):
        scaler().step(optimizer)


@pytest.mark.parametrize("unscaled", [True, False])
def test_settle_counts_a_step_that_the_framework_took_or_skipped_itself(unscaled):
    parameter, optimizer = one_parameter(lr=0.5)
    scaling = scaler(init_scale=16.0)
    for weight, skipped, scale in ((math.inf, 1, 8.0), (1.0, 1, 8.0)):
        optimizer.zero_grad()
        loss = (parameter * weight).sum()
        scaling.attach(loss)
        loss.backward()
        if unscaled:
            scaling.unscale_once(optimizer)
        if torch.isfinite(parameter.grad).all():  # as a framework's loop checks
            optimizer.step()
        scaling.settle(optimizer)
        assert (scaling.counter.skipped, scaling.get_scale()) == (skipped, scale)
    assert scaling.counter.steps == 2
    assert parameter.tolist() == ([0.5, 0.5] if unscaled else [-3.0, -3.0])


def test_reset_begins_anew():
    parameter, optimizer = one_parameter()
    scaling = scaler(init_scale=16.0)
    for weight in (math.inf, math.inf, 1.0):
        train(scaling, parameter, optimizer, weight)
    scaling.reset()
    assert scaling.state_dict() == scaler(init_scale=16.0).state_dict()
    assert scaling.counter == SkipCounter()
    assert scaling.loss_scale == 16.0


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_the_overflow_is_known_on_the_device_between_unscaling_and_update(value):
    scaling, (parameter, optimizer) = scaler(), one_parameter()
    assert scaling.overflow is None
    scaling.attach(parameter.sum())
    parameter.grad = torch.full_like(parameter, value)
    scaling.unscale_(optimizer)
    assert scaling.overflow.shape == ()
    assert scaling.overflow.device == parameter.device
    assert bool(scaling.overflow) is (not math.isfinite(value))
    scaling.step(optimizer)
    assert bool(scaling.overflow) is (not math.isfinite(value))
    scaling.update()
    assert scaling.overflow is None


def test_what_a_caller_gives_the_step_reaches_the_optimizer():
    class Optimizer(torch.optim.SGD):
        def step(self, *args, **kwargs):
            seen.append((args, kwargs))

    seen = []
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = Optimizer([parameter], lr=0.1), LossScaler(device="cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer, 1, more=2)
    scaler.update()
    assert seen == [((1,), {"more": 2})]


@pytest.mark.parametrize(("new", "scale"), [(8.0, 8.0), (0.25, 1.0), (2.0**127, 2.0**126)])
def test_a_scale_that_the_caller_sets_is_kept_within_the_bounds(new, scale):
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), LossScaler(device="cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update(new)
    assert scaler.get_scale() == scale
    assert scaler.counter.steps == 1


def test_a_scaler_that_torch_turned_off_does_nothing(monkeypatch):
    """Without a GPU torch turns its scaler off; our scaler then changes nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = LossScaler(device="cuda")
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    loss = parameter.sum()
    scaler.attach(loss)
    loss.backward()
    assert scaler.is_unscaled(optimizer)
    scaler.unscale_once(optimizer)
    scaler.unscale_(optimizer)
    assert torch.equal(parameter.grad, torch.ones(2))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter.detach(), torch.full((2,), 0.5))
    scaler.settle(optimizer)
    scaler.forget(optimizer)
    scaler.reset()
    assert scaler.counter.steps == 0
    assert scaler.overflow is None
    assert scaler.loss_scale == scaler.get_scale() == 1.0
