"""A Megatron worker in a real Ray actor, made from the class that NeMo-RL exports."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import precision_shim

from ...rank_server import Ranks
from ..support import NEMO_RL
from .support import POLICY

pytestmark = pytest.mark.slow
ROOT = Path(precision_shim.__file__).parents[1]
TESTS = Path(__file__).parents[3]

MIXIN = "precision_shim_adapters.nemo_rl.megatron.ReportingWorker"
SETUP = (
    f"{POLICY.partition(':')[0]}:setup_megatron_model"
    if Version("0.6") > NEMO_RL
    else "nemo_rl.models.megatron.setup:setup_model_and_optimizer"
)


def driven(ranks: Ranks, model: Path, folder: Path, **environment: str) -> dict[str, Any]:
    """Run the driver with its own environment variables; returns the driver's output."""
    variables = {key: os.environ[key] for key in os.environ if key != "PRECISION_SHIM"}
    # With PYTHONPATH the cluster's processes run this source tree; an installed wheel needs none.
    paths = [str(TESTS), *(path for path in sys.path if path and Path(path).is_dir())]
    variables |= {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), **environment}
    ranks(
        "script",
        world=1,
        timeout=560,
        arguments=[str(Path(__file__).with_name("ray_driver.py")), str(model), str(folder)],
        environment=variables,
        cwd=str(TESTS),
        workers=True,
    )
    line = next((one for one in ranks.said[0].splitlines() if one.startswith("FOUND ")), None)
    assert line is not None, ranks.said[0][-6000:]
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


@pytest.mark.oldest
@pytest.mark.timeout(600)  # the driver and the worker each import all of NeMo-RL
def test_an_actor_skips_an_overflow_and_reports_it(
    ranks: Ranks, model: Path, tmp_path: Path
) -> None:
    found = driven(ranks, model, tmp_path / "converted", PRECISION_SHIM="1")
    worker = found["worker"]
    assert worker["pid"] != found["pid"]
    assert MIXIN in worker["mro"]
    assert SETUP in worker["wrapped"]
    assert "megatron.bridge.training.optim:setup_optimizer" in worker["wrapped"]
    assert worker["params_dtype"] == "torch.float32"
    assert worker["check"] is False
    assert [math.isnan(one["grad_norm"]) for one in found["steps"]] == [True, True]
    assert [one["loss_scale"] for one in found["steps"]] == [[2.0**30], [2.0**29]]
    assert [one["skipped_steps"] for one in found["steps"]] == [[1], [2]]
