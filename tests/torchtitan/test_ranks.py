"""Two processes over gloo: sharded parameters, and a pipeline of two stages."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from ..every_framework.checkpoint_doctor import verdict
from ..processes.rank_server import Ranks
from . import cpu
from .conftest import TORCH_HAS_PIPELINES


def skipped_together(found: list[dict[str, Any]], prefix: str = "") -> None:
    """Both ranks have the same scale and finite values, and skipped the second of three steps."""
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


@pytest.mark.parametrize("case", [pytest.param("policy", marks=pytest.mark.slow), "pretrain"])
def test_two_shards_skip_together_and_resume(ranks: Ranks, case: str) -> None:
    """The overflow occurs on one rank only."""
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


def test_a_rank_without_the_shim_is_named(ranks: Ranks) -> None:
    first, _ = ranks("pretrain", first=0, last=1, only=0)
    assert "PartialInstallationError" in first["error"]
    assert "of 2 ranks, rank 1: without the shim" in first["error"]


def test_files_of_two_saves_are_refused(ranks: Ranks) -> None:
    """A killed save, or another job's, leaves one rank's file beside another save's."""
    places = []
    for _ in range(2):
        ranks("pretrain", first=0, last=2, save=True)
        places.append(_folder(ranks) / "checkpoint" / "step-2")
    assert verdict(places[0], "torchtitan", on=True) == "exact"
    shutil.copyfile(*(place / "__1_0.distcp" for place in places))
    assert verdict(places[1], "torchtitan", on=True) == "refused"
    for found in ranks("pretrain", folder=_folder(ranks), first=2, last=3, load=True):
        assert "the ranks' files hold different loss scaler states" in found["error"]


def _folder(ranks: Ranks) -> Any:
    return ranks._folders / str(ranks._count)


@pytest.mark.slow
def test_two_parts_of_each_tensor_skip_together(ranks: Ranks) -> None:
    """Tensor parallelism: the overflow occurs on one rank first.

    Experts are not sharded, because gloo cannot exchange parts of unequal sizes.
    """
    parallelism = {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}
    found = ranks("policy", first=0, last=3, overflows=[1], parallelism=parallelism)
    skipped_together(found, "trainer/")


@pytest.mark.slow
@pytest.mark.skipif(not TORCH_HAS_PIPELINES, reason="torchtitan's pipelines need torch 2.15")
@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 2), ("ZBVZeroBubble", None)])
def test_two_pipeline_stages(
    torchtitan: None, ranks: Ranks, schedule: str, chunks: int | None
) -> None:
    """The last stage computes the loss; both stages skip an overflow, and share one scale.

    The plan gives each rank the parameters that it has.
    """
    from torchtitan.config import ParallelismConfig

    from precision_shim_tools.plan.torchtitan import built, stages_of

    options: dict[str, Any] = {
        "parallelism": {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_schedule": schedule,
            "data_parallel_shard_degree": 1,
        },
        "chunks": chunks,
        "layers": 2 if schedule == "1F1B" else 4,
    }
    last = 1 if schedule == "1F1B" else 0  # in a V schedule the first rank also has the last stage
    plain = ranks("pretrain", first=0, last=1, **options)
    parts = stages_of(
        "",
        ParallelismConfig(**options["parallelism"]),
        spec := cpu.model_spec(layers=options["layers"]),
        built(spec),
    )
    for one, part in zip(plain, parts, strict=True):
        names = {f"{weight.name}.exp_avg" for weight in part.weights}
        assert names == {name for name in one["values"] if name.endswith(".exp_avg")}
    found = ranks("pretrain", first=0, last=3, overflows=[1], on_rank=last, **options)
    skipped_together(found)
    # Figures of the first step that were not unscaled would be 1,024 times as large.
    (alone,) = ranks("pretrain", world=1, first=0, last=1, chunks=chunks, layers=options["layers"])
    loss = "loss_metrics/global_avg_loss"
    ours = float(plain[last]["metrics"][0][loss])
    assert 1 / 32 < ours / float(alone["metrics"][0][loss]) < 32
    norm = float(plain[last]["metrics"][0]["grad_norm"])
    assert 1 / 32 < norm / float(alone["metrics"][0]["grad_norm"]) < 32
