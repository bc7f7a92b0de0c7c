"""The automatic audit: its own errors end the audit and leave the training alone."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.auditing import automatic, latest
from precision_shim.errors import CheckpointLayoutError, PrecisionShimWarning

from ...every_framework.shim_warnings import ours


@pytest.fixture
def shim() -> Iterator[Any]:
    try:
        yield lambda **settings: precision_shim.install(
            features=["audit"], export=False, settings=settings
        )
    finally:
        precision_shim.uninstall()


def made(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    model = torch.nn.Linear(4, 4).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(1, 4, dtype=model.weight.dtype)).sum().backward()
    optimizer.step()


def test_an_audit_that_fails_costs_the_audit(shim: Any) -> None:
    shim()
    model, optimizer = made()
    with pytest.warns(PrecisionShimWarning, match="the audit of AdamW failed: ZeroDivisionError"):
        automatic.watch(
            "verl", "actor", optimizer, model=model, scaler=(model, lambda model: 1 / 0)
        )
    step(model, optimizer)
    assert latest.audits() == []


def test_the_audit_of_an_optimizer_that_is_gone_is_forgotten(shim: Any) -> None:
    shim()
    (_, first), second = made(), made()
    for optimizer in (first, second[1]):
        automatic.watch("verl", "actor", optimizer)
    assert len(precision_shim.status().audit) == 2
    del first, optimizer
    gc.collect()
    (left,) = precision_shim.status().audit
    step(*second)
    (later,) = precision_shim.status().audit
    assert (left.before_step, later.before_step) == (True, False)


def test_a_dropped_engine_leaves_no_audit(shim: Any) -> None:
    class Engine:
        """Has what an engine of a framework has."""

        def __init__(self) -> None:
            self.scaler = torch.amp.GradScaler("cpu", enabled=False)
            self.model, self.optimizer = made()
            options = {"model": self.model, "scaler": (self, lambda engine: engine.scaler)}
            automatic.watch("verl", "actor", self.optimizer, **options)

    shim()
    engine = [Engine() for _ in range(6)].pop()
    gc.collect()
    assert len(precision_shim.status().audit) == 1
    step(engine.model, engine.optimizer)
    (audit,) = precision_shim.status().audit
    assert audit.complete


def test_the_audit_of_a_frozen_model_is_kept_while_the_model_is(shim: Any) -> None:
    class Placeholder:
        """Stands for the optimizer of a model that is not trained."""

        param_groups: tuple[()] = ()

    shim()
    model, placeholder = made()[0].requires_grad_(False), Placeholder()
    automatic.watch("verl", "ref", placeholder, model=model)
    number = len(latest.audits())
    del placeholder
    gc.collect()
    assert len(latest.audits()) == number
    del model
    gc.collect()
    assert latest.audits() == []


@pytest.mark.filterwarnings("error")
def test_under_warnings_as_errors_it_is_said_and_not_raised(
    shim: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shim()
    model, optimizer = made()
    automatic.watch("verl", "actor", optimizer, scaler=(model, lambda model: 1 / 0))
    assert "the audit of AdamW failed" in capsys.readouterr().err


def test_a_meter_that_cannot_be_made_costs_the_meter(shim: Any) -> None:
    class Unknown:
        """An optimizer of a package without a reader."""

    shim(watch_updates=1)
    model, optimizer = made()
    unknown = Unknown()
    with pytest.warns(PrecisionShimWarning) as caught:
        automatic.watch("verl", "actor", unknown, inner=optimizer, model=model)
    told = [str(one.message) for one in caught]
    assert "verl actor: lost updates are not measured: AuditError" in told[0]
    assert "the audit of Unknown failed: AuditError" in told[1]
    step(model, optimizer)


def test_lost_updates_are_told_with_framework_and_model(shim: Any) -> None:
    shim(watch_updates=1)
    model, optimizer = made()
    optimizer.param_groups[0]["lr"] = 1e-12
    automatic.watch("verl", "actor", optimizer, model=model)
    step(model, optimizer)
    with pytest.warns(PrecisionShimWarning, match="verl.*, actor, model: "):
        step(model, optimizer)  # the figures of a step are there one step later


def test_a_stub_over_a_frozen_model_is_looked_at_once(shim: Any) -> None:
    class Stub:
        chained_optimizers = ()
        optimizer = None

    shim()
    model, stub = torch.nn.Linear(4, 4).requires_grad_(False), Stub()
    automatic.watch("verl", "actor", stub, model=model)
    (audit,) = latest.audits()
    assert (audit.framework, audit.subject, audit.parts[0].parameters) == ("verl", "actor", 0)


def test_an_optimizer_that_is_gone_is_not_looked_at(shim: Any) -> None:
    shim()
    model, optimizer = made()
    watcher = automatic._Watcher(
        "verl", "actor", None, [weakref.ref(model)], optimizer=weakref.ref(optimizer)
    )
    del optimizer
    gc.collect()
    assert watcher.look() is None


def test_the_second_audit_is_after_the_first_step_and_the_last(shim: Any) -> None:
    shim()
    model, optimizer = made()
    for _ in range(2):  # the second call does nothing
        automatic.watch("verl", "actor", optimizer, model=model)
    (before,) = latest.audits()
    step(model, optimizer)
    (after,) = latest.audits()
    step(model, optimizer)
    assert (before.complete, after.complete) == (False, True)
    assert latest.audits() == [after]
    assert len(optimizer._optimizer_step_post_hooks) == 1


@pytest.mark.parametrize("told", [True, False])
def test_a_problem_warns_unless_the_user_was_told(shim: Any, told: bool) -> None:
    shim()
    model, optimizer = made(torch.float16)
    off = torch.amp.GradScaler("cpu", enabled=False)
    options = {"scaler": (model, lambda _: off), "told": lambda _: told}
    if told:
        automatic.watch("verl", "actor", optimizer, model=model, **options)
    else:
        with pytest.warns(PrecisionShimWarning, match="actor: scaler-missing: verl"):
            automatic.watch("verl", "actor", optimizer, model=model, **options)


@pytest.mark.parametrize("by_user", [True, False])
def test_strict_raises_unless_the_user_wrote_it(by_user: bool) -> None:
    model, optimizer = made(torch.float16)
    off = torch.amp.GradScaler("cpu", enabled=False)
    options = {
        "scaler": (model, lambda _: off),
        "by_user": lambda _: by_user,
        "told": lambda _: True,
    }
    precision_shim.install(features=["audit"], export=False, strict=True)
    try:
        if by_user:
            automatic.watch("", "", optimizer, model=model, **options)
        else:
            with pytest.raises(precision_shim.errors.InconsistentPrecisionError, match="-audit"):
                automatic.watch("", "", optimizer, model=model, **options)
    finally:
        precision_shim.uninstall()


def test_a_first_step_without_a_gradient_is_not_the_last_look(shim: Any) -> None:
    shim()
    model, optimizer = made()
    automatic.watch("verl", "actor", optimizer, model=model)
    optimizer.step()
    optimizer.step()
    (audit,) = precision_shim.status().audit
    assert audit.before_step
    for _ in range(2):  # looked at after the steps 1, 2 and 4
        step(model, optimizer)
    (audit,) = precision_shim.status().audit
    assert audit.complete
    assert audit.parts[0].components["exp_avg"].state == "live"


@pytest.mark.parametrize("strict", [False, True])
def test_a_load_that_rounds_states_is_told(strict: bool) -> None:
    wide, narrow = made(), made(torch.bfloat16)
    for one in (wide, narrow):
        step(*one)
    states = {one: one[1].state_dict() for one in (wide, narrow)}
    try:
        precision_shim.install(features=["audit"], export=False, strict=strict)
        key = "model_dtype=fp32"
        for model, optimizer in (wide, narrow):
            automatic.watch("verl", "actor", optimizer, model=model, fp32_key=key)
        with ours() as said:
            wide[1].load_state_dict(states[narrow])
            narrow[1].load_state_dict(states[narrow])
        assert said == []
        told = (
            r"actor: loading .* its exp_avg and exp_avg_sq from fp32 to bf16.*\(model_dtype=fp32\)"
        )
        with contextlib.ExitStack() as expected:
            if strict:
                expected.enter_context(pytest.raises(CheckpointLayoutError, match=told))
            else:
                expected.enter_context(pytest.warns(PrecisionShimWarning, match=told))
            narrow[1].load_state_dict(states[wide])
    finally:
        precision_shim.uninstall()
    with ours() as said:
        narrow[1].load_state_dict(states[wide])
    assert said == []


def test_torchs_planner_is_wrapped_while_the_audit_is_on(shim: Any) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner as Planner

    plain = Planner.create_local_plan
    shim()
    assert vars(Planner.create_local_plan)["__wrapped__"] is plain
    for features in (["fp16-scaling"], []):
        precision_shim.install(features=features, export=False)
        assert Planner.create_local_plan is plain
