"""The meter of lost updates over FSDP2's shares: two ranks, each against an fp64 reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ..rank_server import Ranks
from .updates_reference import hold


@pytest.fixture(scope="module")
def updates(run_ranks: Ranks) -> list[Any]:
    pytest.importorskip("torch.distributed.fsdp", reason="FSDP2 needs torch >= 2.6")
    return run_ranks("updates")


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_each_rank_against_an_fp64_reference(updates: list[Any], name: str) -> None:
    for rank in updates:
        (figures,) = rank[name]["figures"]
        (group,) = figures["groups"]
        assert figures["step"] == 4
        assert group["elements"] == group["sampled"] == rank[name]["elements"]
        assert group["weights"]["dtype"] == name
        assert group["rollout"]["dtype"] == "bf16"
        shares = {int(step): one for step, one in rank[name]["shares"].items()}  # from JSON
        hold(figures, cast("Any", SimpleNamespace(shares=shares)))
        if name == "bf16":
            assert figures["weights"] > 0.5
        if name == "fp32":
            assert figures["weights"] < 0.05
    assert sum(rank[name]["elements"] for rank in updates) == 8 * 15 + 15 * 3 + 3


def test_no_step_is_changed(updates: list[Any]) -> None:
    for rank in updates:
        for name in ("fp32", "bf16"):
            assert rank[name]["same"]
