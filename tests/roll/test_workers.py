"""ROLL's own workers in a real local Ray cluster on a CPU, which ROLL's own pipeline starts.

Nothing in the driver calls ``install()``: the installed package's start-up file and the variable
bring the shim into the driver, and from there into the actors of a cluster that knew no variable.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from ..processes.rank_server import Ranks, serving
from ..processes.ray_cluster import drive

HERE = Path(__file__).parent
DRIVER = HERE / "ray_driver.py"
pytestmark = pytest.mark.usefixtures("start_up_file")
SCALES = {
    "fsdp2_train": [1024, 1024, 512, 256, 256],
    "megatron_train": [1024, 1024, 1024, 512, 512],  # halved after a second overflow
}
KEYS = ("actor_train/loss_scale", "actor_train/skipped_steps")
ONLY_STATUS = """#!/bin/sh
# ROLL asks whether a cluster runs. If none did, ROLL would start one, and at its end kill every
# Ray cluster of this machine (ray stop --force).
test "$1" = status
"""


drivers = serving("tests.verl.ray_processes")


def driven(drivers: Ranks, folder: Path, strategy: str, **variables: str) -> dict[str, Any]:
    (folder / "bin").mkdir()
    command = folder / "bin" / "ray"
    command.write_text(ONLY_STATUS)
    command.chmod(0o755)
    path = os.pathsep.join((str(command.parent), os.environ["PATH"]))
    sites = (HERE / "site",)
    job = (drivers, DRIVER, strategy, folder)
    options: dict[str, Any] = {"paths": sites, "timeout": 900, "PATH": path, **variables}
    try:
        return drive(*job, **options)
    except AssertionError as error:
        if "EADDRINUSE" not in str(error):
            raise
        return drive(*job, **options)  # a process took the port that ROLL had found free


def column(found: dict[str, Any], key: str) -> list[Any]:
    return [step.get(key) for step in found["steps"]]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("strategy", SCALES)
def test_rolls_own_job_trains_and_skips(drivers: Ranks, tmp_path: Path, strategy: str) -> None:
    variables = {"PRECISION_SHIM": "1", "PRECISION_SHIM_LOSS_SCALE_INIT": "1024"}
    found = driven(drivers, tmp_path, strategy, **variables)
    worker, reference = found["actor_train"], found["reference"]
    assert len({found["pid"], worker["pid"], reference["pid"]}) == 3
    assert found["asked"] == ["tests.roll.workers.Worker"]
    # The driver has compared the dtypes of all workers.
    bf16 = "bf16 beside the actor's fp16"
    assert found["driver"] == {f"{one}: rollout-agreement": bf16 for one in ("ref", "rollout")}
    # The strategy that the worker calls is patched.
    module = {"fsdp2_train": "fsdp2", "megatron_train": "megatron"}[strategy]
    kind = {"fsdp2_train": "FSDP2", "megatron_train": "Megatron"}[strategy]
    for name in ("initialize", "train_step"):
        place = f"roll.distributed.strategy.{module}_strategy:{kind}TrainStrategy.{name}"
        assert place in worker["wrapped"]
    assert reference["wrapped"] == []
    # The second and the third step overflow.
    assert column(found, KEYS[0]) == SCALES[strategy]
    assert column(found, KEYS[1]) == [0, 1, 2, 2, 2]
    norms = column(found, "actor_train/grad_norm")
    assert [math.isnan(one) for one in norms] == [False, True, True, False, False]
    assert all(map(math.isfinite, column(found, "actor/loss")[3:]))
    first, *skipped, last = worker["digests"]
    assert len({first, last, *skipped}) == 3
    assert len(skipped) == 3  # before the two steps that are skipped, and after
    assert worker["finite"]
    if strategy == "fsdp2_train":
        assert worker["dtypes"] == ["torch.float32"]
        assert reference["shim"] == []
        assert "precision_shim_scaler.json" in found["saved"]
