"""The lost-update meter of FSDP2 and of experts on two ranks, compared with fp64 references."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ..processes.rank_server import Ranks
from .updates_reference import hold


def from_json(shares: dict[str, Any]) -> Any:
    """A rank's reference, rebuilt from JSON, in which step numbers are strings."""
    return cast("Any", SimpleNamespace(shares={int(step): one for step, one in shares.items()}))


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
        hold(figures, from_json(rank[name]["shares"]))
        if name == "bf16":
            assert figures["weights"] > 0.5
        if name == "fp32":
            assert figures["weights"] < 0.05
    assert sum(rank[name]["elements"] for rank in updates) == 8 * 15 + 15 * 3 + 3


def test_no_step_is_changed(updates: list[Any]) -> None:
    for rank in updates:
        for name in ("fp32", "bf16"):
            assert rank[name]["same"]


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_experts_have_a_meter_of_their_own(run_ranks: Ranks) -> None:
    for rank in run_ranks("expert_updates"):
        assert list(rank["parts"]) == ["dense", "experts"]
        assert list(rank["parts"].values()) == rank["figures"]
        for figures, shares in zip(rank["figures"], rank["shares"], strict=True):
            hold(figures, from_json(shares))
        ours, frameworks = rank["metrics"]
        assert ours == frameworks
        assert 0.0 <= ours["updates_lost"] < 0.05 < ours["updates_lost_rollout"]
