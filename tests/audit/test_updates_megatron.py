"""The lost-update meter on real Megatron optimizers, started by a call or by a setting."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import precision_shim
from precision_shim.auditing import meters

from ..every_framework.shim_warnings import ours
from ..processes.rank_server import Ranks
from . import builds

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
    "no masters": (
        slow(replace(builds.PLANTED["master-missing"], fp32_bucket=False), clip_grad=0.0),
        "bf16",
    ),
}


@pytest.mark.parametrize("name", BUILDS)
def test_only_16_bit_weights_without_masters_lose_most(one_process: Any, name: str) -> None:
    build, stored = BUILDS[name]
    chunks, optimizer = builds.make(build)
    watch = precision_shim.watch_updates(chunks, optimizer, every=1)
    for _ in range(4):
        builds.step(chunks, optimizer)
    (figures,) = watch.figures()
    assert figures["step"] == 3
    assert figures["dtypes"]["weights"] == stored
    assert (figures["weights"] > 0.5) == (stored == "bf16")


def test_experts_have_a_meter_of_their_own(run_ranks: Ranks) -> None:
    for rank in run_ranks("expert_updates"):
        assert list(rank["parts"]) == ["dense", "experts"]
        assert list(rank["parts"].values()) == rank["figures"]
        ours, frameworks = rank["metrics"]
        assert ours == frameworks
        shares = [figures["weights"] for figures in rank["figures"]]
        assert min(shares) <= ours["updates_lost"] <= max(shares) < 0.05


@pytest.fixture
def shim(one_process: Any) -> Iterator[Callable[..., precision_shim.Status]]:
    pytest.importorskip("verl", reason="an adapter on Megatron is woken by its framework")

    def install(**settings: Any) -> precision_shim.Status:
        return precision_shim.install(features=["audit"], settings=settings, export=False)

    try:
        yield install
    finally:
        precision_shim.uninstall()


def test_by_the_setting(shim: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shim(watch_updates=2, audit_dir=tmp_path)
    with ours() as told:
        chunks, optimizer = builds.make(slow(BUILDS["no masters"][0], lr=8e-6))
        for _ in range(5):
            builds.step(chunks, optimizer)
    (audit,) = precision_shim.status().audit
    figures = audit.parts[0].updates
    assert figures is not None
    assert (figures["step"], figures["every"]) == (4, 2)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == audit.to_dict()
    assert capsys.readouterr().err.count("updates lost to rounding at step 2: stored weights") == 1
    (warned,) = (text for text in told if "rounded away" in text)
    assert "megatron-core" in warned
    assert "updates-lost" in {one.code for one in audit.notes}
    assert meters.metrics(optimizer, "actor/")["actor/updates_lost"] == figures["weights"]
    precision_shim.uninstall()
    assert meters.metrics(optimizer) == {}
    inner = optimizer.chained_optimizers[0].optimizer
    assert not inner._optimizer_step_pre_hooks
    assert not inner._optimizer_step_post_hooks


def test_without_the_setting_there_are_no_figures(shim: Any) -> None:
    shim()
    chunks, optimizer = builds.make(HONEST["precision-aware"])
    for _ in range(3):
        builds.step(chunks, optimizer)
    assert [one.parts[0].updates for one in precision_shim.status().audit] == [None]
    assert meters.metrics(optimizer) == {}
