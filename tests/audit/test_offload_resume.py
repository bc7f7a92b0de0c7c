"""How a precision-aware optimizer that Megatron offloads to the CPU resumes.

docs/megatron.md describes how Megatron resumes it without the shim.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.errors import CheckpointLayoutError

from ..processes.rank_server import Ranks
from ..testing import tiny_training
from . import builds
from .offloading import READABLE, offloading, same_stepped, stepped
from .test_masters import gpu, shim

__all__ = ["gpu", "shim"]

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("verl", reason="an adapter on Megatron is woken by its framework")

SHARDINGS = pytest.mark.parametrize("sharding", READABLE)


def saved(folder: Path, sharding: str, build: builds.Build) -> tuple[list[Any], list[float], Any]:
    """Train and save; returns the saved states, then losses and states of two further steps."""
    first = builds.make(build)
    builds.train(*first, 3)
    tiny_training.save(*first, folder, sharding)
    there = stepped(first[1])
    return there, builds.train(*first, 2, first=3), stepped(first[1])


@pytest.mark.parametrize(
    ("sharding", "fraction"),
    [(READABLE[0], 1.0), *((one, 0.5) for one in READABLE), (READABLE[1], 0.0)],
)
def test_a_resume_is_exact(
    shim: Callable[..., Any], tmp_path: Path, sharding: str, fraction: float
) -> None:
    shim()
    build = offloading(fraction)
    there, straight, after = saved(tmp_path, sharding, build)
    second = builds.make(build, seed=1)
    tiny_training.load(*second, tmp_path)
    assert same_stepped(stepped(second[1]), there)
    assert builds.train(*second, 2, first=3) == straight
    assert same_stepped(stepped(second[1]), after)
    # A count that no step moves would remain in the states.
    (inner,) = (one.optimizer for one in second[1].chained_optimizers)
    assert {int(state.get("step", 5)) for state in inner.state.values()} == {5}


@SHARDINGS
def test_what_megatron_makes_of_it(gpu: Any, tmp_path: Path, sharding: str) -> None:
    """If this test fails, Megatron itself resumes offloaded states, and the seams can go."""
    build = offloading(0.5)
    _, _, after = saved(tmp_path, sharding, build)
    second = builds.make(build, seed=1)
    tiny_training.load(*second, tmp_path)
    builds.train(*second, 2, first=3)
    assert not same_stepped(stepped(second[1]), after)


@pytest.mark.parametrize("feature", ["bf16-dispatch", "fp16-scaling"])
def test_what_was_saved_without_the_shim(
    shim: Callable[..., Any], tmp_path: Path, feature: str
) -> None:
    build = offloading(0.5)
    _, straight, after = saved(tmp_path, "dp_reshardable", build)
    shim(feature)
    second = builds.make(build, seed=1)
    tiny_training.load(*second, tmp_path)
    assert builds.train(*second, 2, first=3) == straight
    assert same_stepped(stepped(second[1]), after)


def test_without_a_step_count_it_is_refused(shim: Callable[..., Any], tmp_path: Path) -> None:
    build = offloading(0.0)
    saved(tmp_path, "dp_zero_gather_scatter", build)
    shim()
    second = builds.make(build, seed=1)
    with pytest.raises(CheckpointLayoutError, match="no step count") as refused:
        tiny_training.load(*second, tmp_path)
    assert "PRECISION_SHIM_FEATURES=-bf16-dispatch,-fp16-scaling" in str(refused.value)
    precision_shim.uninstall()
    tiny_training.load(*builds.make(build, seed=1), tmp_path)


def test_half_of_it_after_all_of_it(shim: Callable[..., Any], tmp_path: Path) -> None:
    """A loaded step count reaches the GPU's and the CPU's optimizer, whichever of them saved it."""
    shim()
    there, _, _ = saved(tmp_path, "dp_reshardable", offloading(1.0))
    for fraction in (0.5, 0.0):
        second = builds.make(offloading(fraction), seed=1)
        tiny_training.load(*second, tmp_path)
        assert same_stepped(stepped(second[1]), there)


def test_saved_again_before_a_step(shim: Callable[..., Any], tmp_path: Path) -> None:
    """If weights are loaded after a resume, the next checkpoint contains these weights."""
    from precision_shim_adapters.megatron import reload_masters

    shim()
    build = offloading(0.5)
    saved(tmp_path / "first", "dp_reshardable", build)
    second = builds.make(build, seed=1)
    tiny_training.load(*second, tmp_path / "first")
    with torch.no_grad():
        for parameter in second[0][0].parameters():
            parameter.mul_(2)
    reload_masters("verl", "actor", second[1])
    there = stepped(second[1])
    tiny_training.save(*second, tmp_path / "second", "dp_reshardable")
    third = builds.make(build, seed=2)
    tiny_training.load(*third, tmp_path / "second")
    assert same_stepped(stepped(third[1]), there)


def test_one_that_is_not_precision_aware_is_refused_by_megatron(
    shim: Callable[..., Any], tmp_path: Path
) -> None:
    """Megatron raises its own error instead of resuming with other values."""
    shim()
    build = offloading(1.0, precision_aware=False)
    first = builds.make(build)
    builds.train(*first, 1)
    tiny_training.save(*first, tmp_path, "dp_reshardable")
    with pytest.raises(KeyError):
        tiny_training.load(*builds.make(build), tmp_path)


def test_on_two_ranks(run_ranks: Ranks) -> None:
    """Each rank has its own part of the states, and its own share of that part on the CPU."""
    for rank in run_ranks("offloaded"):
        assert rank == {name: [True, True] for name in READABLE}
