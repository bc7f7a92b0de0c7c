"""Real NeMo-RL workers in a real local Ray cluster on a CPU; NeMo-RL's worker group starts them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ..every_framework.lacking import assert_told
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


KINDS = ["v1", "v2"] if Version("0.5") <= NEMO_RL else ["v2"]
"""The job's workers. On the oldest version only the one that is sent to Ray in a way of its own."""


def audited(folder: Path) -> None:
    """After its first step, the worker has written the dtypes of its optimizer states."""
    (file,) = folder.iterdir()
    audit = json.loads(file.read_text())
    assert file.name == "nemo-rl.policy.model.rank0.audit.json"
    (part,) = audit["parts"]
    assert (audit["world_size"], audit["ok"], audit["complete"]) == (1, True, True)
    # FSDP stores parameters in fp32 and computes in fp16.
    assert part["components"]["params"]["dtypes"] == ["fp32"]
    assert (part["scaler"], part["owned"]) == ("LossScaler", part["parameters"])


def skips_the_first(kind: str, found: dict[str, Any]) -> None:
    """The first step overflows; no later step is skipped."""
    start, (overflow, *steps) = found["start"], found["steps"]
    assert found["refused"] == REFUSED
    # Before 0.6 Ray pickles the second worker's class by value and never imports its module.
    whole = kind == "v2" and Version("0.6") > NEMO_RL
    assert (CLIP_V2 if whole else NAMES[kind]) in start["wrapped"]
    assert "precision_shim_adapters.nemo_rl.training.dtensor.ScaledWorker" in start["mro"]
    assert math.isnan(overflow["grad_norm"])
    assert overflow["loss_scale"] == [pytest.approx(1e30)]
    assert overflow["skipped_steps"] == [1.0]
    after = overflow["worker"]
    assert after["parameters"] == start["parameters"]
    assert (after["scale"], after["skipped"]) == (pytest.approx(1e4), 1)
    for step in steps:
        assert math.isfinite(step["grad_norm"])
        assert step["loss_scale"] == [pytest.approx(1e4)]
        assert step["skipped_steps"] == [1.0]
    assert steps[0]["worker"]["parameters"] != start["parameters"]
    assert steps[-1]["worker"]["tools"] == []


@pytest.mark.oldest
@pytest.mark.timeout(1200)
def test_workers_train_skip_save_and_resume(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    """And the driver tells of a worker without the package."""
    audits = tmp_path / "audits"
    on = {"PRECISION_SHIM": "1", "PRECISION_SHIM_AUDIT_DIR": str(audits)}
    script, paths = HERE / "ray_driver.py", (HERE / "site",)
    given = (script, model, tmp_path, *KINDS)
    found = drive(ranks, *given, paths=paths, timeout=1100, **on)
    for kind in KINDS:
        skips_the_first(kind, found[kind])
    assert_told(found["told"], "nemo_rl")
    found = found[KINDS[-1]]
    audited(audits)
    # A new actor resumes with the state of the old one.
    assert "precision_shim_scaler.json" in found["files"]
    saved, after = found["steps"][-2:]
    old, new = saved["worker"], found["resumed"]
    assert old["pid"] != new["pid"]
    for key in ("parameters", "scale", "skipped"):
        assert old[key] == new[key]
    for key in ("loss", "grad_norm"):
        assert found["again"][key] == after[key]
    assert found["again"]["worker"]["parameters"] == after["worker"]["parameters"]
    assert found["again"]["worker"]["tools"] == []
