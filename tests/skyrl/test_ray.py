"""Workers of SkyRL's own actor classes, which SkyRL's own actor groups start in a local Ray.

The workers need the installed package with its start-up file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ..every_framework.lacking import assert_told
from ..processes.rank_server import Ranks
from ..processes.ray_cluster import drive
from .support import python_path

pytestmark = [
    pytest.mark.usefixtures("start_up_file"),
    pytest.mark.slow,
    pytest.mark.oldest,
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def found(ranks: Ranks, folder: Path, checkpoints: dict[str, Path]) -> dict[str, Any]:
    """What one driver finds, for all tests: a cluster and its workers take a minute to start."""
    return drive(
        ranks,
        Path(__file__).with_name("ray_driver.py"),
        checkpoints["float32"],
        folder,
        paths=(Path(python_path()),),
        timeout=880,
        CUDA_VISIBLE_DEVICES="0,1",  # Ray counts what this variable names
        PRECISION_SHIM="1",
        PRECISION_SHIM_AUDIT_DIR=str(folder / "audits"),
        PRECISION_SHIM_LOG="quiet",
        PRECISION_SHIM_LOSS_SCALE_INIT="1024",
    )


def assert_wrapped(found: dict[str, Any], *methods: str) -> None:
    # The actor's own class has the wrapped methods, not only the class in the imported module.
    for name in methods:
        assert (found["states"][name], found["patched"][name]) == ("wrapped", True), found
    # SkyRL's driver finds the methods on the handle, and the worker can run them.
    assert found["listed"] == ["init_model", "forward_backward"]
    assert "forward_backward()" in found["called"], found["called"]
    assert found["bucket written"] is False, "what was written travels with the config"
    assert found["bucket"] == True  # noqa: E712


def test_a_megatron_worker_reports_wrapped(found: dict[str, Any]) -> None:
    methods = ("forward_backward", "init_model", "make_megatron_module", "init_configs")
    assert_wrapped(found["megatron"], *methods)


def test_the_driver_trains_a_worker_in_fp16(found: dict[str, Any], folder: Path) -> None:
    """With SkyRL's own dispatch an overflow is skipped, and a checkpoint contains the scaler."""
    figures = [
        [metrics.get(name) for name in ("loss_scale", "skipped_steps")]
        for metrics, _ in found["steps"] + found["on"]
    ]
    assert found["carried"]["PRECISION_SHIM"] == "1"
    assert found["steps"][1][1] == "nan"
    assert found["tools"] == []
    assert_wrapped(found, "forward_backward")
    scales, skipped = zip(*figures, strict=True)
    assert scales == (1024.0, 1024.0, 512.0, 512.0, 512.0)
    assert skipped == (0.0, 0.0, 1.0, 1.0, 1.0)
    assert all(math.isfinite(float(norm)) for _, norm in found["steps"][2:] + found["on"])
    assert found["again"] == found["on"]
    # The worker audits its optimizer when it is built, and again after the first step.
    (file,) = (folder / "audits").iterdir()
    audit = json.loads(file.read_text())
    assert file.name == "skyrl.policy.model.rank0.audit.json"
    assert (audit["ok"], audit["complete"]) == (True, True)
    (part,) = audit["parts"]
    assert part["components"]["exp_avg"]["dtypes"] == ["fp32"]
    assert part["scaler"] == "LossScaler"


def test_the_driver_tells_of_a_worker_without_the_package(found: dict[str, Any]) -> None:
    assert_told(found["told"], "skyrl")
