"""Two processes over gloo: sharded parameters, and a pipeline of two stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ..rank_server import Ranks, rank_server
from .conftest import TORCH_HAS_PIPELINES

CASES = ("policy", "pretrain")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Starts processes that train together; returns what each found, by rank."""
    with rank_server("tests.torchtitan.ranks", tmp_path_factory.mktemp("ranks")) as server:
        yield server


def skipped_together(found: list[dict[str, Any]], prefix: str = "") -> None:
    """All ranks have one scale, skipped the second of three steps, and are finite."""
    first, second = found
    assert first["scaler"] == second["scaler"] == [512.0, 1, 3, 1, 0]
    for one in found:
        assert one["finite"]
        assert [step[f"{prefix}skipped_steps"] for step in one["metrics"]] == ["0.0", "1.0", "1.0"]
        assert [step[f"{prefix}loss_scale"] for step in one["metrics"]] == [
            "1024.0",
            "1024.0",
            "512.0",
        ]


@pytest.mark.parametrize("case", CASES)
def test_two_shards_skip_together_and_resume(ranks: Ranks, case: str) -> None:
    """An overflow on one rank alone."""
    prefix = "trainer/" if case == "policy" else ""
    whole = ranks(case, first=0, last=4, overflows=[1])
    part = ranks(case, first=0, last=3, overflows=[1], save=True)
    skipped_together(part, prefix)
    resumed = ranks(case, folder=_folder(ranks), first=3, last=4, load=True)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours["values"] == theirs["values"]
        assert ours["scaler"] == theirs["scaler"]
        assert ours["metrics"] == theirs["metrics"][-1:]
        assert not ours["warned"]


def _folder(ranks: Ranks) -> Any:
    return ranks._folders / str(ranks._count)


def test_alone_one_rank_destroys_both(ranks: Ranks) -> None:
    found = ranks("policy", first=0, last=2, overflows=[1], on=False)
    assert not any(one["finite"] for one in found)


@pytest.mark.skipif(not TORCH_HAS_PIPELINES, reason="torchtitan's pipelines need torch 2.15")
@pytest.mark.parametrize("chunks", [None, 2], ids=["plain", "chunked"])
def test_two_pipeline_stages(ranks: Ranks, chunks: int | None) -> None:
    """The loss is the last stage's; its overflow is skipped on both, and one scale is kept."""
    options: dict[str, Any] = {
        "parallelism": {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_schedule": "1F1B",
            "data_parallel_shard_degree": 1,
        },
        "chunks": chunks,
    }
    plain = ranks("pretrain", first=0, last=1, **options)
    found = ranks("pretrain", first=0, last=3, overflows=[1], **options)
    skipped_together(found)
    # The first step is that of a model without pipeline: what is reported is unscaled.
    (alone,) = ranks("pretrain", world=1, first=0, last=1, chunks=chunks)
    loss = "loss_metrics/global_avg_loss"
    ours = float(plain[1]["metrics"][0][loss])
    assert 0.8 < ours / float(alone["metrics"][0][loss]) < 1.25
    norm = float(plain[1]["metrics"][0]["grad_norm"])
    assert 0.5 < norm / float(alone["metrics"][0]["grad_norm"]) < 2
