"""Real NeMo-RL workers in a real local Ray cluster on a CPU; NeMo-RL's worker group starts them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ..every_framework.lacking import told_of_workers
from ..processes.rank_server import Ranks
from ..processes.ray_cluster import drive
from .support import NAMES, NEMO_RL

HERE = Path(__file__).parent
REFUSED = ["got an unexpected keyword argument 'nonsense'"] * 2
"""Ray's message in the driver, with the shim and without it."""
CLIP_V2 = (
    "nemo_automodel.components.distributed.grad_utils:get_grad_norm"
    if Version("0.5") > NEMO_RL
    else "nemo_automodel.components.training.utils:scale_grads_and_clip_grad_norm"
)
pytestmark = [pytest.mark.usefixtures("start_up_file"), pytest.mark.slow]


def audited(folder: Path, dtype: str, scaler: str | None) -> None:
    """After its first step, each rank has written the dtypes of its optimizer states."""
    files = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    assert sorted(files) == [f"nemo-rl.policy.model.rank{rank}.audit.json" for rank in range(2)]
    for audit in files.values():
        (part,) = audit["parts"]
        assert (audit["world_size"], audit["ok"], audit["complete"]) == (2, True, True)
        assert part["components"]["exp_avg"]["sharded"]
        assert part["components"]["params"]["dtypes"] == [dtype]
        assert (part["data_parallel_size"], part["scaler"]) == (2, scaler)
    assert sum(one["parts"][0]["owned"] for one in files.values()) == part["parameters"]


def skips_the_first(kind: str, found: dict[str, Any]) -> None:
    """The first step overflows on each rank; no later step is skipped."""
    start, (overflow, *steps) = found["start"], found["steps"]
    assert found["refused"] == REFUSED
    for one in start:
        # Before 0.6 Ray pickles the second worker's class by value and never imports its module.
        whole = kind == "v2" and Version("0.6") > NEMO_RL
        assert (CLIP_V2 if whole else NAMES[kind]) in one["wrapped"]
        assert "precision_shim_adapters.nemo_rl.training.dtensor.ScaledWorker" in one["mro"]
    assert math.isnan(overflow["grad_norm"])
    assert overflow["loss_scale"] == [pytest.approx(1e30)]
    assert overflow["skipped_steps"] == [1.0]
    for before, after in zip(start, overflow["workers"], strict=True):
        assert after["parameters"] == before["parameters"]
        assert (after["scale"], after["skipped"]) == (pytest.approx(1e4), 1)
    for step in steps:
        assert math.isfinite(step["grad_norm"])
        assert step["loss_scale"] == [pytest.approx(1e4)]
        assert step["skipped_steps"] == [1.0]
    assert steps[0]["workers"][0]["parameters"] != start[0]["parameters"]
    assert [one["tools"] for one in steps[-1]["workers"]] == [[]] * len(start)


@pytest.mark.oldest
@pytest.mark.timeout(1200)
def test_workers_train_skip_save_and_resume(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    audits = tmp_path / "audits"
    on = {"PRECISION_SHIM": "1", "PRECISION_SHIM_AUDIT_DIR": str(audits)}
    script, paths = HERE / "ray_driver.py", (HERE / "site",)
    found = drive(ranks, script, model, tmp_path, paths=paths, timeout=1100, **on)
    skips_the_first("v1", found["v1"])
    found = found["v2"]
    skips_the_first("v2", {**found, "steps": [*found["steps"], found["on"]]})
    assert len({one["pid"] for one in found["start"]}) == 2
    audited(audits, "fp32", "LossScaler")  # FSDP stores parameters in fp32 and computes in fp16
    # New actors resume with the state of the old actors.
    assert "precision_shim_scaler.json" in found["files"]
    for old, new in zip(found["steps"][-1]["workers"], found["resumed"], strict=True):
        assert old["pid"] != new["pid"]
        assert {key: old[key] for key in ("parameters", "scale", "skipped")} == {
            key: new[key] for key in ("parameters", "scale", "skipped")
        }
    assert found["again"]["loss"] == found["on"]["loss"]
    assert found["again"]["grad_norm"] == found["on"]["grad_norm"]
    for old, new in zip(found["on"]["workers"], found["again"]["workers"], strict=True):
        assert old["parameters"] == new["parameters"]
        assert new["tools"] == []


@pytest.mark.oldest
@pytest.mark.timeout(600)
def test_the_driver_tells_of_a_worker_without_the_package() -> None:
    told_of_workers("nemo_rl", HERE / "site")
