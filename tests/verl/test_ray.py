"""verl's real training workers, by its own worker group, in a real local Ray cluster on a CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from packaging.version import Version

from ..rank_server import Ranks
from ..ray_cluster import drive
from .conftest import VERL

pytestmark = [
    pytest.mark.usefixtures("start_up_file"),
    pytest.mark.slow,
    pytest.mark.oldest,
    pytest.mark.skipif(
        Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
    ),
]


DRIVER = Path(__file__).with_name("ray_driver.py")


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_workers_train_skip_save_and_resume(
    ray_drivers: Ranks, checkpoint: Path, tmp_path: Path, backend: str
) -> None:
    audits = tmp_path / "audits"
    found = drive(
        ray_drivers,
        DRIVER,
        backend,
        checkpoint,
        tmp_path,
        timeout=900,
        PRECISION_SHIM="1",
        PRECISION_SHIM_AUDIT_DIR=str(audits),
        PRECISION_SHIM_LOSS_SCALE_INIT="1024",
    )
    start = found["start"]
    assert len({found["driver"], *(one["pid"] for one in start)}) == 3
    assert all(one["wrapped"] for one in start)
    # The second step overflows on one rank: both skip it.
    names = ("loss_scale", "skipped_steps")
    figures = [[step[name][0] for name in names] for step in (*found["steps"], *found["on"])]
    assert [one[1] for one in figures] == [0, 1, 1, 1, 1]
    assert [math.isnan(one["grad_norm"][0]) for one in found["steps"]] == [False, True, False]
    # Megatron's scaler halves its scale only after a second overflow (hysteresis 2).
    after = {"fsdp": 512, "megatron": 1024}[backend]
    assert [one[0] for one in figures] == [1024, 1024, after, after, after]
    trained, skipped = ([one["parameters"] for one in found[key]] for key in ("taken", "skipped"))
    assert trained == skipped != [one["parameters"] for one in start]
    # New actors go on where the old ones were.
    assert {one["pid"] for one in start}.isdisjoint(one["pid"] for one in found["resumed"])
    for before, after in (("saved", "resumed"), ("end", "same end")):
        for old, new in zip(found[before], found[after], strict=True):
            assert old["parameters"] == new["parameters"]
    if backend == "megatron":  # the scaler's state is Megatron's own; the counts are not part of it
        counts = [step.pop("skipped_steps") for step in (*found["on"], *found["again"])]
        assert counts == [[1], [1], [0], [0]]
        assert len({step["lr"][0] for step in (*found["steps"], *found["on"])}) == 5
    assert found["again"] == found["on"]
    # Each rank has written what its optimizer is.
    files = sorted(audits.iterdir())
    assert [one.name for one in files] == [
        f"verl.actor.model.rank{rank}.audit.json" for rank in range(2)
    ]
    for audit in (json.loads(one.read_text()) for one in files):
        assert (audit["world_size"], audit["ok"], audit["complete"]) == (2, True, True)


@pytest.mark.timeout(1000)
def test_without_the_variable_nothing_is_there(
    ray_drivers: Ranks, checkpoint: Path, tmp_path: Path
) -> None:
    found = drive(ray_drivers, DRIVER, "fsdp", checkpoint, tmp_path, timeout=900)
    assert not any(one["shim"] for one in found["start"])
    assert not {"loss_scale", "skipped_steps"} & set(found["steps"][1])
