"""PRECISION_SHIM_WATCH_UPDATES adds the shares of lost updates to verl's metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import precision_shim

from ..processes.rank_server import Ranks
from .conftest import VERL
from .megatron_fp16_support import Training
from .support import optim_config

pytestmark = [
    pytest.mark.skipif(
        Version("0.7") > VERL, reason="verl 0.6's engine: covered whole by test_untested_version"
    ),
    pytest.mark.slow,
    pytest.mark.oldest,
]

FIGURES = {"updates_lost", "updates_lost_exp_avg_sq"}


def test_megatron_engine(
    fused_adam: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, shim: Any
) -> None:
    def train(every: int) -> tuple[list[dict[str, Any]], Any]:
        shim(settings={"watch_updates": every})
        one = Training(checkpoint, monkeypatch, dtype="bfloat16", optim=optim_config(lr=6e-6))
        return [one.train(seed=seed) for seed in range(4)], one.parameters()

    plain, weights = train(0)  # with the shim, which chooses the states in some versions
    watched, same = train(1)
    assert weights.equal(same)
    assert [one["grad_norm"] for one in watched] == [one["grad_norm"] for one in plain]
    # Figures appear one step late, and a precision-aware FusedAdam has no masters before a step.
    assert FIGURES & watched[0].keys() == set()
    for one in watched[2:]:
        assert one.keys() >= FIGURES - {"updates_lost_exp_avg_sq"}
        assert 0.0 <= one["updates_lost"] <= 1.0
    # The first step has no earlier second moment, so no second moment can decrease.
    assert ["updates_lost_exp_avg_sq" in one for one in watched] == [False, False, True, True]
    (audit,) = precision_shim.status().audit
    figures = audit.parts[0].updates
    assert figures is not None
    assert figures["weights"] == watched[-1]["updates_lost"]
    assert figures["exp_avg_sq"] == watched[-1]["updates_lost_exp_avg_sq"]


def test_fsdp_engine(fsdp_ranks: Ranks) -> None:
    for rank in fsdp_ranks("lost_updates"):
        first, _, *later = rank["metrics"]
        assert FIGURES & first.keys() == set()
        assert all(one.keys() >= FIGURES for one in later)
        assert all(0.0 <= one[name] <= 1.0 for one in later for name in FIGURES)
        assert rank["kept"]["weights"] == later[-1]["updates_lost"]
        assert rank["same"]


@pytest.mark.skipif(Version("0.8") <= VERL, reason="this version has no legacy workers")
def test_legacy_workers(fsdp_ranks: Ranks) -> None:
    for rank in fsdp_ranks("legacy_lost_updates", world=1):
        for role in ("actor", "critic"):
            assert f"{role}/updates_lost" not in rank[role][0]
            assert 0.0 <= rank[role][-1][f"{role}/updates_lost"] <= 1.0
