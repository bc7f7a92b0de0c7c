"""verl's real training workers in a real local Ray cluster on a CPU, in verl's own worker group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from packaging.version import Version

from ..every_framework.lacking import told_of_workers
from ..processes.rank_server import Ranks
from ..processes.ray_cluster import drive
from .conftest import VERL
from .ray_verdict import trained_skipped_and_resumed

pytestmark = [
    pytest.mark.usefixtures("start_up_file"),
    pytest.mark.slow,
    pytest.mark.skipif(
        Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
    ),
]


DRIVER = Path(__file__).with_name("ray_driver.py")


@pytest.mark.timeout(1000)
def test_workers_train_skip_save_and_resume(
    ray_drivers: Ranks, checkpoint: Path, tmp_path: Path
) -> None:
    audits = tmp_path / "audits"
    # Megatron's scaler halves its scale only after a second overflow (hysteresis 2).
    scales = {"fsdp": [1024, 1024, 512, 512, 512, 256], "megatron": [1024] * 5 + [512]}
    found = drive(
        ray_drivers,
        DRIVER,
        ",".join(scales),
        checkpoint,
        tmp_path,
        timeout=900,
        PRECISION_SHIM="1",
        PRECISION_SHIM_AUDIT_DIR=str(audits),
        PRECISION_SHIM_LOSS_SCALE_INIT="1024",
    )
    assert found.keys() == scales.keys()
    for backend, one in found.items():
        trained_skipped_and_resumed(one, scales[backend])
    megatron = found["megatron"]  # Megatron saves the scaler's state, but no skip counts
    counts = [step.pop("skipped_steps") for step in (*megatron["on"], *megatron["again"])]
    assert counts == [[1], [2], [2], [0], [1], [1]]
    assert len({step["lr"][0] for step in (*megatron["steps"], *megatron["on"])}) == 6
    for one in found.values():
        assert str(one["again"]) == str(one["on"])  # As text, because NaN != NaN.
    # Each rank has written an audit of each of its optimizers.
    files = list(audits.iterdir())
    assert {one.name for one in files} == {
        f"verl.actor.{model}.rank{rank}.audit.json"
        for model in ("model", "model-2")
        for rank in range(2)
    }
    for audit in (json.loads(one.read_text()) for one in files):
        assert (audit["world_size"], audit["ok"], audit["complete"]) == (2, True, True)


@pytest.mark.timeout(600)
def test_the_driver_tells_of_a_worker_without_the_package() -> None:
    told_of_workers("verl")
