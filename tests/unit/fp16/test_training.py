"""Scaled training without a framework: one optimizer, or a container of several, as adapters do."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from precision_shim.errors import (
    LossScaleError,
    PrecisionShimWarning,
    ScalerCheckpointError,
    SeamError,
)
from precision_shim.scaling import LossScaler, to_tensor
from precision_shim_adapters.fp16 import ScaledTraining

OVERFLOWS = (0, 4)
"""Steps whose gradients overflow; the first is one of them."""


class Container(Optimizer):
    """An optimizer over others, one for each part of a model, with hooks of its own."""

    def __init__(self, inner):
        self.inner = list(inner)
        groups = [group for one in self.inner for group in one.param_groups]
        super().__init__([p for group in groups for p in group["params"]], {})

    def step(self, closure=None):
        for one in self.inner:
            one.step()

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for one in self.inner:
            one.zero_grad(set_to_none)


class Trainer:
    """A small trainer: ``forward_backward`` several times, then ``optim_step``."""

    def __init__(self):
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
        inner = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in self.model]
        self.optimizer = Container(inner)
        self.schedules = [LambdaLR(one, lambda step: 1 / (step + 1)) for one in inner]
        self.tokens, self.bias = 0, 0
        self.optimizer.register_step_post_hook(self.balance)

    def balance(self, optimizer, args, kwargs):
        """Like the hook of a mixture of experts: what it counts is in no checkpoint."""
        self.bias += self.tokens
        self.tokens = 0

    def loss(self, step, micro):
        generator = torch.Generator().manual_seed(10 * step + micro)
        self.tokens += 1
        weight = math.inf if step in OVERFLOWS and micro == 1 else 1.0
        return self.model(torch.randn(8, 4, generator=generator)).square().mean() * weight

    def optim_step(self):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        for one in self.schedules:
            one.step()
        self.optimizer.zero_grad()
        return {"grad_norm": float(norm)}

    def state(self):
        moments = [
            value
            for one in self.optimizer.inner
            for state in one.state.values()
            for _, value in sorted(state.items())
        ]
        tensors = [*self.model.parameters(), *moments]
        rates = [one.get_last_lr() for one in self.schedules]
        return [one.detach().clone() for one in tensors], rates, self.bias, self.tokens


def same(one, other):
    return one[1:] == other[1:] and all(
        torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True)
    )


def make(**configured):
    values = {"init_scale": 2.0**10, "growth_interval": 3, **configured}
    return ScaledTraining.make(
        "toy", "model", device="cpu", because="its parameters are fp16", configured=values
    )


def drive(trainer, training, steps):
    """What an adapter does around such a trainer."""
    reported = []
    for step in steps:
        for micro in range(3):
            loss = trainer.loss(step, micro)
            training.attach(loss)
            loss.backward()
        with training.one_step(trainer.optimizer, trainer.optimizer.inner):
            found = trainer.optim_step()
        found["grad_norm"] = training.norm(found["grad_norm"])
        reported.append({**found, **training.metrics("trainer/")})
    return reported


def by_hand(trainer, scaler, steps):
    """The same with torch's scaler written into the loop."""
    for step in steps:
        for micro in range(3):
            scaler.scale(trainer.loss(step, micro)).backward()
        scaler.unscale_(trainer.optimizer)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        scaler.step(trainer.optimizer)
        scaler.update()
        if step in OVERFLOWS:
            trainer.balance(trainer.optimizer, (), {})
        for one, optimizer in zip(trainer.schedules, trainer.optimizer.inner, strict=True):
            optimizer._opt_called = True
            one.step()
        trainer.optimizer.zero_grad()


def test_a_container_is_trained_as_by_a_loop_by_hand():
    ours, hand, training = Trainer(), Trainer(), make()
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    reported = drive(ours, training, range(9))
    by_hand(hand, scaler, range(9))
    assert same(ours.state(), hand.state())
    assert training.scaler.get_scale() == scaler.get_scale()
    assert [step for step, one in enumerate(reported) if math.isnan(one["grad_norm"])] == [0, 4]
    assert reported[-1]["trainer/skipped_steps"] == 2.0
    assert reported[4]["trainer/loss_scale"] == 2.0 * reported[5]["trainer/loss_scale"]


def test_a_skipped_step_of_a_container_runs_its_hooks_and_moves_nothing_else():
    trainer, training = Trainer(), make()
    steps = [one.step for one in trainer.optimizer.inner]
    before = [one.detach().clone() for one in trainer.model.parameters()]
    drive(trainer, training, range(1))
    assert (trainer.bias, trainer.tokens) == (3, 0)
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert not any(one.state for one in trainer.optimizer.inner)
    assert [one.step for one in trainer.optimizer.inner] == steps


def test_without_the_inner_optimizers_the_hooks_of_a_skipped_step_do_not_run():
    """What the test above differs from: torch's scaler leaves out the whole step."""
    trainer, training = Trainer(), make()
    loss = trainer.loss(0, 1)
    training.attach(loss)
    loss.backward()
    with training.one_step(trainer.optimizer):
        trainer.optimizer.step()
    assert (training.skipped, trainer.bias) == (True, 0)


@pytest.mark.parametrize("looks", [True, False], ids=["looks at the norm", "does not look"])
def test_a_framework_that_may_skip_itself(looks):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer, training = torch.optim.AdamW([parameter]), make()
    for weight in (1.0, math.nan, 1.0):
        loss = (parameter * weight).sum()
        training.attach(loss)
        loss.backward()
        before = parameter.detach().clone()
        with training.one_step(optimizer):
            norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
            if not looks or torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
        assert training.skipped == torch.equal(before, parameter) == math.isnan(weight)
        reported = training.norm(norm)
        assert reported.isnan() if training.skipped else reported is norm
    assert training.metrics() == {"loss_scale": 512.0, "skipped_steps": 1.0}
    assert training.norm(1.5) == 1.5


def test_a_step_without_gradients_is_left_to_the_framework():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer, training = torch.optim.SGD([parameter]), make()
    with training.one_step(optimizer):
        optimizer.step()
    assert training.scaler.counter.steps == 0
    assert not training.skipped


def test_25_skipped_steps_end_the_job():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer, training = torch.optim.SGD([parameter]), make()

    def step():
        loss = (parameter * math.inf).sum()
        training.attach(loss)
        loss.backward()
        with training.one_step(optimizer):
            optimizer.step()

    for _ in range(24):
        step()
    with pytest.raises(LossScaleError, match="25 optimizer steps in a row"):
        step()


# -- a loop of several steps -----------------------------------------------------------------


def clip(parameters):
    """A function that a loop clips with: it gets no trainer, the seam on it asks for it."""
    training = ScaledTraining.current()
    if training is not None:
        training.before_clipping()
    return torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def test_a_loop_of_several_steps():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer, training = torch.optim.SGD([parameter], lr=0.5), make()
    own = optimizer.step
    norms = []

    def loss_function(weight):
        return (parameter * weight).sum(), {"weight": weight}

    scaled = training.scaled(loss_function)
    assert scaled.__name__ == "loss_function"
    with training.several_steps(optimizer):
        for weight in (1.0, math.inf, 2.0):
            loss, figures = scaled(weight)
            assert figures == {"weight": weight}
            loss.backward()
            norms.append(float(clip([parameter])))
            optimizer.step()
            optimizer.zero_grad()
    assert norms[0] == pytest.approx(math.sqrt(3))
    assert norms[2] == pytest.approx(2 * math.sqrt(3))
    assert (training.scaler.counter.steps, training.scaler.counter.skipped) == (3, 1)
    assert not training.skipped
    assert optimizer.step == own
    assert ScaledTraining.current() is None
    optimizer.step()  # as torch's distributed checkpoints do
    assert training.scaler.counter.steps == 3


def test_a_step_whose_gradients_were_not_unscaled_is_an_error():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer, training = torch.optim.SGD([parameter]), make()
    loss = parameter.sum()
    training.attach(loss)
    loss.backward()
    with (
        pytest.raises(SeamError, match=r"toy: a step came before .*FEATURES=-fp16-scaling"),
        training.several_steps(optimizer),
    ):
        optimizer.step()
    assert ScaledTraining.current() is None


def test_a_loss_function_that_returns_the_loss_alone():
    parameter, training, seen = torch.nn.Parameter(torch.ones(1)), make(), []
    loss = training.scaled(parameter.sum, seen.append)()
    loss.backward()
    assert parameter.grad.item() == 2.0**10
    assert seen == [loss]
    assert loss.item() == 1.0


# -- where it is kept ------------------------------------------------------------------------


class Owner:
    scaler = None


def test_every_owner_finds_its_training():
    worker, other = Owner(), Owner()
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer, training = torch.optim.SGD([parameter]), make().keep(worker)
    assert ScaledTraining.of(worker) is training
    assert ScaledTraining.of(other) is ScaledTraining.of(None) is ScaledTraining.of(optimizer)
    training.keep(optimizer)
    assert ScaledTraining.of(optimizer) is training
    assert "_precision_shim_training" not in optimizer.__getstate__()


def test_the_frameworks_own_attribute_decides():
    worker, training = Owner(), make()

    def found():
        return ScaledTraining.of_attribute(worker, "scaler", "toy", "model")

    assert found() is None
    training.keep(worker, "scaler")
    assert worker.scaler is training.scaler
    assert found() is training
    worker.scaler = GradScaler("cpu", init_scale=8.0)
    assert found().scaler is worker.scaler
    assert not found().drives
    assert found().metrics() == {"loss_scale": 8.0}
    worker.scaler = None
    assert found() is None


def test_where_the_frameworks_loop_drives_the_shim_does_not():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    training = ScaledTraining("toy", "model", make().scaler, drives=False)
    scaler = training.scaler
    function = parameter.sum
    assert training.scaled(function) is function
    for weight, skipped in ((1.0, False), (math.inf, True)):
        loss = (parameter * weight).sum()
        training.attach(loss)
        with training.one_step(optimizer), training.several_steps(optimizer):
            training.before_clipping()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        assert training.skipped is skipped
    assert parameter.item() == 0.5
    assert scaler.counter.steps == 2


# -- checkpoints -----------------------------------------------------------------------------


def test_a_directory_and_a_record(tmp_path):
    source = make()
    drive(Trainer(), source, range(6))
    source.save(tmp_path)
    for restore in (
        lambda target: target.restore(tmp_path),
        lambda target: target.restore_record(source.record(), "here"),
        lambda target: target.restore_record(source.record_tensor(), "here"),
    ):
        target = make()
        restore(target)
        assert target.scaler.state_dict() == source.scaler.state_dict()
        assert target.scaler.counter == source.scaler.counter


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("trained", [0, 1, 6])
def test_a_tensor_in_torchs_distributed_checkpoint(tmp_path, trained):
    """Read into the tensor of a process with other settings, whose record is longer."""
    source, target = make(init_scale=2.0**15), make(init_scale=3e38, growth_interval=77)
    drive(Trainer(), source, range(trained))
    dcp.save({"scaler": source.record_tensor(), "step": trained}, checkpoint_id=tmp_path)
    state = {"scaler": target.record_tensor()}
    assert source.record_tensor().shape == state["scaler"].shape
    dcp.load(state, checkpoint_id=tmp_path)
    target = make()
    target.restore_record(state["scaler"], str(tmp_path))
    assert target.scaler.counter == source.scaler.counter
    assert target.scaler.get_scale() == source.scaler.get_scale()
    assert target.scaler._get_growth_tracker() == source.scaler._get_growth_tracker()


def test_what_is_wrong_with_a_tensor():
    training = make()
    damaged = training.record_tensor()
    damaged[100] ^= 1
    cut = training.record_tensor()
    cut[200:] = 0
    for tensor, says in (
        (damaged, "here: .*(digest|not whole JSON)"),
        (cut, "here: not whole JSON"),
        (to_tensor(), "here: it holds no loss scaler state"),
        (torch.full((2048,), 255, dtype=torch.uint8), "here: not whole JSON"),
        (torch.zeros(8), "here: it holds torch.float32"),
    ):
        with pytest.raises(ScalerCheckpointError, match=says):
            training.restore_record(tensor, "here")
    assert training.scaler.get_scale() == 2.0**10


def test_a_checkpoint_without_a_record_leaves_a_fresh_scaler(tmp_path):
    for restore in (
        lambda target: target.restore(tmp_path),
        lambda target: target.restore_record(None, "in here"),
    ):
        training = make()
        drive(Trainer(), training, range(2))
        with pytest.warns(PrecisionShimWarning, match="no loss scaler state at .*fresh"):
            restore(training)
        assert isinstance(training.scaler, LossScaler)
        assert (training.scaler.get_scale(), training.scaler.counter.steps) == (2.0**10, 0)
