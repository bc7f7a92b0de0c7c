"""A Megatron worker in a real Ray actor, made from the class that NeMo-RL exports."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from ...processes.rank_server import Ranks
from ...processes.ray_cluster import drive
from ..support import NEMO_RL
from .support import POLICY

pytestmark = pytest.mark.slow

MIXIN = "precision_shim_adapters.nemo_rl.training.megatron.ReportingWorker"
SETUP = (
    f"{POLICY.partition(':')[0]}:setup_megatron_model"
    if Version("0.6") > NEMO_RL
    else "nemo_rl.models.megatron.setup:setup_model_and_optimizer"
)


@pytest.mark.timeout(600)  # the driver and the worker each import all of NeMo-RL
def test_an_actor_skips_an_overflow_and_reports_it(
    ranks: Ranks, model: Path, tmp_path: Path
) -> None:
    driver = Path(__file__).with_name("ray_driver.py")
    # The cluster's processes run what this process runs: a source tree or an installed wheel.
    paths = tuple(Path(one) for one in sys.path if one and Path(one).is_dir())
    given = (model, tmp_path / "converted")
    found = drive(ranks, driver, *given, paths=paths, timeout=560, PRECISION_SHIM="1")
    worker = found["worker"]
    assert worker["pid"] != found["pid"]
    assert MIXIN in worker["mro"]
    assert SETUP in worker["wrapped"]
    assert "megatron.bridge.training.optim:setup_optimizer" in worker["wrapped"]
    assert worker["params_dtype"] == "torch.float32"
    assert worker["check"] is False
    assert found["end"]["tools"] == []
    assert [math.isnan(one["grad_norm"]) for one in found["steps"]] == [True, True]
    assert [one["loss_scale"] for one in found["steps"]] == [[2.0**30], [2.0**29]]
    assert [one["skipped_steps"] for one in found["steps"]] == [[1], [2]]
