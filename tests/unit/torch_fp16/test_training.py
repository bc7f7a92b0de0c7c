"""Scaled training without a framework, with one optimizer or with a container of several."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import precision_shim
from precision_shim.errors import (
    LossScaleError,
    PrecisionShimWarning,
    ScalerCheckpointError,
    ScalerOfAnotherSaveError,
    SeamError,
    UnsupportedPrecisionError,
)
from precision_shim.process.settings import resolve
from precision_shim.scaling import LossScaler
from precision_shim.scaling.belonging import fingerprints
from precision_shim.scaling.record import digest_of
from precision_shim_adapters.torch_fp16 import ScaledTraining
from precision_shim_adapters.torch_fp16 import training as training_module
from precision_shim_adapters.torch_fp16.settings import settings_for

OVERFLOWS = (0, 4)
"""Steps whose gradients overflow, the first step among them."""


class Container(Optimizer):
    """An optimizer that contains others, one for each part of a model, and has its own hooks."""

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
        """A hook like that of a mixture of experts, whose count is in no checkpoint."""
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
    """Train a ``Trainer`` with the calls that an adapter adds around it."""
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
    """Train with torch's scaler written into the loop."""
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
    """Without the inner optimizers torch's scaler omits the whole step, and no hook runs."""
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


@pytest.mark.parametrize("several", [False, True], ids=["one step", "several steps"])
def test_after_an_exception_the_next_gradients_are_unscaled(several):
    """A Tinker server reports a failing request and accepts the next one."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer, training = torch.optim.SGD([parameter]), make()
    own, stepping = optimizer.step, training.several_steps if several else training.one_step

    def step(fails):
        loss = parameter.sum()
        training.attach(loss)
        loss.backward()
        try:
            with stepping(optimizer):
                norm = clip([parameter])
                if fails:
                    raise RuntimeError("out of memory")
                optimizer.step()
                return float(norm)
        finally:
            optimizer.zero_grad()

    with pytest.raises(RuntimeError, match="out of memory"):
        step(fails=True)
    assert ScaledTraining.current() is None
    assert optimizer.step == own
    assert step(fails=False) == pytest.approx(math.sqrt(3))
    assert training.scaler.counter.steps == 1


def test_a_loop_with_the_scaler_in_it_goes_on_after_an_exception():
    """torch's scaler raises an error for each later step: it takes them for a second one."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), make().scaler
    training = ScaledTraining("toy", "model", scaler, drives=False)

    def step(fails):
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        with training.one_step(optimizer):
            scaler.unscale_(optimizer)
            if fails:
                raise RuntimeError("out of memory")
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(RuntimeError, match="out of memory"):
        step(fails=True)
    step(fails=False)
    assert torch.equal(parameter, torch.zeros(3))
    assert scaler.counter.steps == 1


def test_one_step_around_a_function_that_also_computes_the_gradients():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer, training = torch.optim.SGD([parameter], lr=1.0), make()

    def update():
        with training.one_step(optimizer):
            loss = parameter.sum()
            training.attach(loss)
            loss.backward()
            optimizer.step()

    with pytest.raises(SeamError, match=r"before the gradients were unscaled.* see several_steps"):
        update()
    assert torch.equal(parameter, torch.ones(3))


# -- a loop of several steps -----------------------------------------------------------------


def clip(parameters):
    """A loop's function for clipping: it gets no trainer, so its seam looks up the current one."""
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
        pytest.raises(SeamError, match=r"toy: model: a step came before .*FEATURES=-fp16-scaling"),
        training.several_steps(optimizer),
    ):
        optimizer.step()
    assert ScaledTraining.current() is None


class Stepping:
    """A trainer whose step belongs to a framework ``toy``, unless a test replaces it."""

    def __init__(self):
        self.parameter = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.AdamW([self.parameter], lr=0.5)
        self.training = make(growth_interval=400)
        self.training.guard(self, "step", lambda trainer: (trainer.optimizer,))

    def backward(self, weight=1.0):
        loss = (self.parameter * weight).sum()
        self.training.attach(loss)
        loss.backward()

    def step(self):
        with self.training.one_step(self.optimizer):
            clip([self.parameter])
            self.optimizer.step()
        self.optimizer.zero_grad()


Stepping.step.__module__ = "toy.trainer"


def users_own(self):
    if torch.isfinite(clip([self.parameter])):
        self.optimizer.step()
    self.optimizer.zero_grad()


@pytest.mark.parametrize("patched", [False, True], ids=["subclass", "monkey patch"])
def test_a_step_that_is_not_the_shims_is_an_error(patched, monkeypatch):
    """The first step, or, if the user's check lets none through, the next backward pass."""
    kind = Stepping if patched else type("Mine", (Stepping,), {})
    one, other = kind(), kind()
    one.backward()
    one.step()
    monkeypatch.setattr(kind, "step", users_own)
    before = one.parameter.detach().clone()
    one.backward()
    with pytest.raises(SeamError, match=rf"a step came .*{kind.__name__}\.step, which is not"):
        one.step()
    assert torch.equal(one.parameter, before)
    other.backward(math.inf)
    other.step()
    with pytest.raises(SeamError, match=rf"were dropped .*{kind.__name__}\.step, which is not"):
        other.backward()
    assert torch.equal(other.parameter, torch.ones(3))


def test_what_is_no_step_stays_legal():
    class Mine(Stepping):
        def step(self):
            super().step()

    for one in (Stepping(), Mine()):
        for _ in range(3):
            one.backward()
        with torch.no_grad():
            one.training.attach((one.parameter * 2).sum())
        one.training.attach((one.parameter * 2).sum())  # evaluated, without a backward pass
        one.step()
        assert one.training.scaler.counter.steps == 1
    one = Stepping()
    for _ in range(2):  # batches dropped on purpose, and a save before the first step
        one.backward()
        one.optimizer.zero_grad()
        get_optimizer_state_dict(torch.nn.ParameterList([one.parameter]), one.optimizer)
    one.optimizer.step()  # finds no gradient
    one.backward()
    one.step()
    assert one.training.scaler.counter.steps == 1


def test_a_step_skipped_for_its_norm_alone_counts():
    one = Stepping()
    for _ in range(24):
        one.backward()
        with one.training.one_step(one.optimizer):
            pass  # as a loop that finds the norm not finite
        assert math.isnan(one.training.norm(math.inf))
    assert one.training.scaler.get_scale() == 1.0
    assert one.training.scaler.counter.in_row == 24
    one.backward()
    with pytest.raises(LossScaleError), one.training.one_step(one.optimizer):
        pass


def test_a_step_with_a_norm_that_is_not_finite_is_an_error():
    """Clipping by it sets the gradients to zero."""
    one = Stepping()
    one.backward()
    one.step()
    with pytest.raises(LossScaleError, match="their norm is inf"):
        one.training.norm(torch.tensor(math.inf))


def test_a_loss_function_that_returns_the_loss_alone():
    parameter, training, seen = torch.nn.Parameter(torch.ones(1)), make(), []
    loss = training.scaled(parameter.sum, seen.append)()
    loss.backward()
    assert parameter.grad.item() == 2.0**10
    assert seen == [loss]
    assert loss.item() == 1.0


# -- where the record is kept ----------------------------------------------------------------


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
    for none in (None, GradScaler("cpu", enabled=False)):
        worker.scaler = none
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


@pytest.mark.filterwarnings("ignore:.*no loss scaler state")
@pytest.mark.parametrize("kept", [True, False], ids=["with a record", "without"])
def test_a_load_between_a_backward_pass_and_its_step(kept):
    """SkyRL keeps the gradients over a load, which replaces the scale that is in them."""
    one = Stepping()
    one.training.scaler.load_state_dict({**one.training.scaler.state_dict(), "scale": 32.0})
    one.backward(3.0)
    one.training.restore_record(make(init_scale=8.0).record() if kept else None, "here")
    assert one.training.scaler.get_scale() == (8.0 if kept else 2.0**10)
    with one.training.one_step(one.optimizer):
        assert one.parameter.grad.tolist() == [3.0] * 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("trained", [0, 1, 6])
def test_a_tensor_in_torchs_distributed_checkpoint(tmp_path, trained):
    """The record is loaded into the tensor of a process whose settings make a longer record."""
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


# -- records of another save -----------------------------------------------------------------


def shards(folder, **content):
    """Write one rank's files as a framework does; returns their paths by name."""
    found = {}
    for what, value in content.items():
        name = f"{what}_world_size_1_rank_0.pt"
        torch.save({"weight": torch.full((3,), float(value))}, folder / name)
        found[name] = folder / name
    return found


def decided(word):
    """The decisions that contain a word, in their order."""
    lines = [f"{one.chosen}: {one.because}" for one in precision_shim.status().decisions]
    return [line for line in lines if word in line]


def saved(folder):
    """Train six steps, and save the training with its files."""
    source = make()
    drive(Trainer(), source, range(6))
    files = shards(folder, model=1, optim=1, extra_state=1)
    source.save(folder, prints=fingerprints(files))
    return source, files


def test_a_record_beside_the_files_it_was_written_with(tmp_path):
    source, files = saved(tmp_path)
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path, moved)
    (moved / "optim_world_size_1_rank_0.pt").unlink()  # a user may need only the weights
    for place in (tmp_path, moved):
        target = make()
        target.restore(place, {name: place / name for name in files})
        assert target.scaler.state_dict() == source.scaler.state_dict()
        assert target.scaler.counter == source.scaler.counter


@pytest.mark.parametrize("what", ["model", "optim", "extra_state"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_record_beside_a_file_of_another_save_is_not_taken(tmp_path, what, strict, monkeypatch):
    settings = resolve(strict=strict, environ={})
    monkeypatch.setattr(training_module, "current_settings", lambda: settings)
    _, files = saved(tmp_path)
    shards(tmp_path, **{what: 2})
    target = make()
    drive(Trainer(), target, range(2))
    says = f"is of another save .*: {what}_world_size_1_rank_0.pt came from a later or an earlier"
    if strict:
        with pytest.raises(ScalerOfAnotherSaveError, match=says):
            target.restore(tmp_path, files)
        assert target.scaler.counter.steps == 2
        return
    with pytest.warns(PrecisionShimWarning, match=f"{says}.*a fresh scaler at 1024"):
        target.restore(tmp_path, files)
    assert (target.scaler.get_scale(), target.scaler.counter.steps) == (2.0**10, 0)


def test_a_record_beside_a_file_that_it_does_not_name_is_not_taken(tmp_path):
    source, _ = saved(tmp_path)
    other = tmp_path / "model_world_size_2_rank_0.pt"
    torch.save({}, other)
    with pytest.warns(PrecisionShimWarning, match="another save .*: model_world_size_2_rank_0.pt"):
        source.restore(tmp_path, {other.name: other})


def test_a_record_of_the_first_format_is_taken_with_one_line(tmp_path):
    source, files = saved(tmp_path)
    place = tmp_path / "precision_shim_scaler.json"
    record = json.loads(place.read_text())
    del record["files"]
    record["format"] = 1
    record["digest"] = digest_of(record)
    place.write_text(json.dumps(record))
    target = make()
    target.restore(tmp_path, files)
    assert target.scaler.state_dict() == source.scaler.state_dict()
    assert "does not say which files it was written with" in decided("restored")[-1]


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path, monkeypatch):
    source, files = saved(tmp_path)
    name = "optim_world_size_1_rank_0.pt"

    def refused(path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr("precision_shim.scaling.belonging.fingerprint", refused)
    before = source.scaler.state_dict()
    with pytest.raises(ScalerCheckpointError, match=r"rank_0\.pt: cannot be read"):
        source.restore(tmp_path, {name: files[name]})
    assert source.scaler.state_dict() == before


def test_a_record_within_a_frameworks_own_file_names_the_files_before_it(tmp_path):
    source = make()
    drive(Trainer(), source, range(6))
    files = {name: tmp_path / name for name in ("model_world_size_1_rank_0.pt",)}
    record = source.record(files)
    shards(tmp_path, model=1)  # the framework writes this file after it got the record
    torch.save({"client_state": record}, tmp_path / "extra.pt")
    kept = torch.load(tmp_path / "extra.pt", weights_only=True)["client_state"]
    target = make()
    target.restore_record(kept, "here", files=files)
    assert target.scaler.counter == source.scaler.counter
    shards(tmp_path, model=2)
    with pytest.warns(PrecisionShimWarning, match="another save .*: model_world_size_1_rank_0.pt"):
        target.restore_record(kept, "here", files=files)
    assert target.scaler.counter.steps == 0


# -- first scales below 1 --------------------------------------------------------------------


def stepped(scaler, *overflows):
    """The scale after each step; ``overflows`` determines which steps overflow."""
    scales = []
    for overflow in overflows:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter])
        parameter.grad = torch.full((1,), math.inf if overflow else 0.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("here", [{}, {"loss_scale_init": 2.0**16}])
def test_a_first_scale_below_1_is_the_least_one_over_resumes(here):
    """A job that resumes without a first scale, or with another one, keeps the least scale."""

    def training(**settings):
        made = settings_for(shim=resolve(settings=settings, environ={}))
        return ScaledTraining("toy", "model", LossScaler(made, device="cpu"))

    one = training(loss_scale_init=0.25, growth_interval=2)
    assert stepped(one.scaler, True, False, True) == [0.25, 0.25, 0.25]
    for record in (one.record(), one.record_tensor()):
        other = training(**here)
        other.restore_record(record, "here")
        assert other.record()["state"] == one.record()["state"]
        assert other.record()["settings"]["min_scale"] == 0.25
        straight = training(**here)  # the record of a resumed job works as well
        straight.restore_record(other.record(), "here")
        rest = (False, False, True, True, False)
        assert stepped(other.scaler, *rest) == [0.25, 0.5, 0.25, 0.25, 0.25]
        assert stepped(straight.scaler, *rest) == [0.25, 0.5, 0.25, 0.25, 0.25]
        other.scaler.reset()
        assert other.scaler.state_dict()["min_scale"] == 1.0
    stepped(one.scaler, *rest)
    assert one.record()["state"] == straight.record()["state"]


def test_a_lower_first_scale_that_is_set_here_lowers_the_least_one_with_a_line():
    one = make(init_scale=2.0)
    settings = settings_for(shim=resolve(settings={"loss_scale_init": 0.5}, environ={}))
    other = ScaledTraining("toy", "model", LossScaler(settings, device="cpu"))
    other.restore_record(one.record(), "there")
    assert decided("restored")[-1].endswith("least scale 0.5, as set here, and not 1 of there")
    assert stepped(other.scaler, True, True, True) == [1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("dtype", "options", "fault"),
    [
        (torch.float16, {}, "its eps of 1e-08 is 0"),
        (torch.float16, {"foreach": True, "eps": 2.9e-8}, "its eps of 2.9e-08 is 0"),
        (torch.float16, {"eps": 3e-8}, ""),
        (torch.float16, {"eps": 0.0}, ""),
        (torch.float16, {"fused": True}, ""),
        (torch.float32, {}, ""),
        (torch.bfloat16, {}, ""),
    ],
)
def test_moments_in_fp16(dtype, options, fault):
    """What is refused makes a weight infinite in torch alone."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    frozen = torch.nn.Parameter(torch.ones(4, dtype=torch.float16), requires_grad=False)
    optimizer = torch.optim.AdamW([weight, frozen], lr=1e-6, **options)
    training = ScaledTraining.make("toy", "model", device="cpu", because="a test")

    def step():
        training.attach(loss := (weight.float() * 1e-3).sum())
        loss.backward()
        with training.one_step(optimizer):
            optimizer.step()

    if not fault:
        step()
        assert weight.isfinite().all() or options.get("eps") == 0.0
        return
    with pytest.raises(UnsupportedPrecisionError, match=f"model: AdamW .*{fault}"):
        step()
    with pytest.raises(UnsupportedPrecisionError):  # also a second time
        step()
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer.step()
    assert weight.isinf().all()
