"""verl's real training workers in a real local Ray cluster on a CPU, in verl's own worker group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ..every_framework.lacking import assert_told
from ..processes.rank_server import Ranks
from ..processes.ray_cluster import drive
from .conftest import VERL
from .ray_verdict import trained_skipped_and_resumed

pytestmark = [
    pytest.mark.usefixtures("start_up_file"),
    pytest.mark.slow,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(
        Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
    ),
]


DRIVER = Path(__file__).with_name("ray_driver.py")


SCALES = {"fsdp": [1024, 1024, 512, 512, 512, 256], "megatron": [1024] * 5 + [512]}
"""Megatron's scaler halves its scale only after a second overflow (hysteresis 2)."""


@pytest.fixture(scope="module")
def audits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audits")


@pytest.fixture(scope="module")
def found(
    ray_drivers: Ranks, checkpoint: Path, audits: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The results of the jobs, all in one cluster."""
    return drive(
        ray_drivers,
        DRIVER,
        ",".join(SCALES),
        checkpoint,
        tmp_path_factory.mktemp("saved"),
        *("told", "sides"),
        timeout=900,
        PRECISION_SHIM="1",
        PRECISION_SHIM_AUDIT_DIR=str(audits),
        PRECISION_SHIM_LOSS_SCALE_INIT="1024",
    )


def test_workers_train_skip_save_and_resume(found: dict[str, Any], audits: Path) -> None:
    for backend, scales in SCALES.items():
        trained_skipped_and_resumed(found[backend], scales)
    megatron = found["megatron"]  # Megatron saves the scaler's state, but no skip counts
    counts = [step.pop("skipped_steps") for step in (*megatron["on"], *megatron["again"])]
    assert counts == [[1], [2], [2], [0], [1], [1]]
    assert len({step["lr"][0] for step in (*megatron["steps"], *megatron["on"])}) == 6
    for backend in SCALES:
        assert str(found[backend]["again"]) == str(found[backend]["on"])  # as text: NaN != NaN
    # Each rank has written an audit of each of its optimizers.
    files = list(audits.iterdir())
    assert {one.name for one in files} == {
        f"verl.actor.{model}.rank{rank}.audit.json"
        for model in ("model", "model-2")
        for rank in range(2)
    }
    for audit in (json.loads(one.read_text()) for one in files):
        assert (audit["world_size"], audit["ok"], audit["complete"]) == (2, True, True)


def test_the_driver_tells_of_a_worker_without_the_package(found: dict[str, Any]) -> None:
    assert_told(found["told"], "verl")


def test_a_ray_actor_gets_what_the_driver_wrote(found: dict[str, Any]) -> None:
    """With verl's ``run_ppo``; the shim is in the actor's process."""
    assert found["sides"] == {"rollout": "float16", "named": ["wrapped"], "told": []}
