"""The meter of lost updates on real Megatron optimizers, started by a call or by a setting."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.auditing import meters

from ..every_framework.shim_warnings import ours
from . import builds
from .updates_reference import Reference, hold

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")


def slow(build: builds.Build, **fields: Any) -> builds.Build:
    """The build with a learning rate of RL."""
    return replace(build, config=build.config | {"lr": 6e-6} | fields)


HONEST = builds.HONEST
BUILDS = {
    "remainders": (slow(HONEST["precision-aware"]), "bf16+int16"),
    "whole masters": (slow(HONEST["precision-aware, whole masters"]), "fp32"),
    "Megatron's masters": (slow(HONEST["bf16, as Megatron has it"]), "fp32"),
    "not distributed": (slow(HONEST["bf16, not distributed"]), "fp32"),
    "fp8 moments": (slow(HONEST["fp8 moments"]), "bf16+int16"),
    "no masters": (
        slow(replace(builds.PLANTED["master-missing"], fp32_bucket=False), clip_grad=0.0),
        "bf16",
    ),
}


def inners(optimizer: Any) -> list[Any]:
    return [one.optimizer for one in getattr(optimizer, "chained_optimizers", [optimizer])]


def copies(chunks: list[Any]) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in chunks for p in chunk.parameters()]


@pytest.mark.parametrize("name", BUILDS)
def test_against_an_fp64_reference(one_process: Any, name: str) -> None:
    build, stored = BUILDS[name]
    chunks, optimizer = builds.make(build)
    (inner,) = inners(optimizer)
    reference = Reference(inner)
    watch = precision_shim.watch_updates(chunks, optimizer, every=1)
    unchanged = []
    for _ in range(4):
        before = copies(chunks)
        builds.step(chunks, optimizer)
        pairs = zip(before, copies(chunks), strict=True)
        unchanged.append(sum(int((a == b).sum()) for a, b in pairs))
    (figures,) = watch.figures()
    assert figures["step"] == 3
    hold(figures, reference)
    groups = figures["groups"]
    assert {one["weights"]["dtype"] for one in groups} == {stored}
    assert {one["rollout"]["dtype"] for one in groups} == {"bf16"}
    # Parameters that the engines get stay unchanged if they have no update or rounding loses it.
    stayed = sum(
        one["rollout"]["lost"] + one["sampled"] - one["weights"]["updates"] for one in groups
    )
    assert stayed == unchanged[2]
    assert (figures["weights"] > 0.5) == (name == "no masters")
    assert figures["rollout"] > 0.5


def test_an_overflow_is_not_counted(one_process: Any) -> None:
    chunks, optimizer = builds.make(slow(HONEST["fp16"]))
    watch = precision_shim.watch_updates(chunks, optimizer, every=1)
    for _ in range(3):
        builds.step(chunks, optimizer)
    (before,) = watch.figures()
    for chunk in chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(float("inf"))
    assert optimizer.step()[0] is False
    builds.step(chunks, optimizer)
    (after,) = watch.figures()
    assert (before["step"], after["step"]) == (2, 3)
    assert after["weights"] < 0.05


# -- by itself -----------------------------------------------------------------------------------


@pytest.fixture
def shim(one_process: Any) -> Iterator[Callable[..., precision_shim.Status]]:
    pytest.importorskip("verl", reason="an adapter on Megatron is woken by its framework")

    def install(**settings: Any) -> precision_shim.Status:
        return precision_shim.install(features=["audit"], settings=settings, export=False)

    try:
        yield install
    finally:
        precision_shim.uninstall()


def hooks(inner: Any) -> int:
    return len(inner._optimizer_step_pre_hooks) + len(inner._optimizer_step_post_hooks)


def test_by_the_setting(shim: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shim(watch_updates=2, audit_dir=tmp_path)
    chunks, optimizer = builds.make(slow(HONEST["precision-aware"]))
    for _ in range(3):
        builds.step(chunks, optimizer)
    (audit,) = precision_shim.status().audit
    figures = audit.parts[0].updates
    assert figures is not None
    assert (figures["step"], figures["every"]) == (2, 2)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == audit.to_dict()
    assert capsys.readouterr().err.count("updates lost to rounding at step 2: stored weights") == 1
    assert meters.metrics(optimizer)["updates_lost_rollout"] == figures["rollout"] > 0.5
    assert meters.metrics(optimizer, "actor/")["actor/updates_lost"] < 0.05
    precision_shim.uninstall()
    assert meters.metrics(optimizer) == {}
    assert [hooks(one) for one in inners(optimizer)] == [0]


def test_a_loss_of_most_warns_and_is_noted(shim: Any) -> None:
    shim(watch_updates=1)
    with ours() as told:
        chunks, optimizer = builds.make(slow(BUILDS["no masters"][0], lr=8e-6))  # warned of once
        for _ in range(4):
            builds.step(chunks, optimizer)
    said = [text for text in told if "rounded away" in text]
    groups = {text.partition("parameter group ")[2][0] for text in said}
    assert len(said) == len(groups) >= 1
    assert all("(lr 8e-06)" in one and "megatron-core" in one for one in said)
    (audit,) = precision_shim.status().audit
    assert "updates-lost" in {one.code for one in audit.notes}
    assert audit.problems
    assert precision_shim.audit(chunks, optimizer).parts[0].updates == audit.parts[0].updates


def test_without_the_setting_there_are_no_figures(shim: Any) -> None:
    shim()
    chunks, optimizer = builds.make(HONEST["precision-aware"])
    for _ in range(3):
        builds.step(chunks, optimizer)
    assert [one.parts[0].updates for one in precision_shim.status().audit] == [None]
    assert meters.metrics(optimizer) == {}
