"""SkyRL's delta sync into the real vLLM: the engine's weights, bit by bit, and its answers.

SkyRL's other syncs (nccl, ipc) need CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from precision_shim.cli import main

from ..rank_server import Ranks, rank_server
from ..ray_cluster import drive
from ..tiny_models import make_checkpoint

JOBS = {
    "fp16 from fp32": {"stored": "float32", "dtype": "float16"},
    "fp16 from fp16": {"stored": "float16", "dtype": "float16"},
    "fp16 from bf16": {"stored": "bfloat16", "dtype": "float16"},
    "bf16 from fp32": {"stored": "float32", "dtype": "bfloat16"},
}
"""Jobs by the engine's dtype and the base checkpoint's dtype."""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with rank_server("tests.vllm.skyrl_ranks", tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def found(launch: Ranks) -> dict[str, Any]:
    """Results with the shim, which does not change this sync but warns of its rounding."""
    (one,) = launch("on", world=1, **JOBS)
    return one


@pytest.mark.parametrize("job", JOBS)
def test_weights_go_over_model_dtype_and_the_base_checkpoints(
    found: dict[str, Any], job: str
) -> None:
    engine = found["engines"][job]
    assert engine["dtypes"] == [f"torch.{JOBS[job]['dtype']}"]
    assert engine["changed"]
    if job == "fp16 from bf16":
        assert engine["way"] == ["over both"]
    else:
        assert "once" in engine["way"]


def test_the_worker_tells_of_the_one_that_lost(found: dict[str, Any]) -> None:
    (message,) = found["said"]
    assert "the delta sync sends the dtype of the base checkpoint, bf16" in message


def test_without_the_shim_the_engine_holds_the_same(launch: Ranks, found: dict[str, Any]) -> None:
    job = "fp16 from bf16"
    (alone,) = launch("off", world=1, **{job: JOBS[job]})
    assert alone == {"engines": {job: found["engines"][job]}, "said": []}


@pytest.mark.usefixtures("start_up_file")
def test_its_own_server_tells_what_it_holds(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In SkyRL's own Ray actor the audit records the server's weights before and after a sync."""
    model, audits = make_checkpoint(tmp_path / "model", width=64), tmp_path / "audits"
    with rank_server("tests.verl.ray_processes", tmp_path_factory.mktemp("driver")) as drivers:
        done = drive(
            drivers,
            Path(__file__).with_name("skyrl_driver.py"),
            model,
            tmp_path,
            "float16",
            timeout=800,
            CUDA_VISIBLE_DEVICES="0",  # Ray refuses its GPU, which is only a number, beside none
            PRECISION_SHIM="1",
            PRECISION_SHIM_AUDIT_DIR=str(audits),
        )
    assert done["tokens"] == 4
    assert done["actor"]["process"] != done["process"]
    assert set(done["actor"]["seams"].values()) == {"wrapped"}
    before, after = done["held"]
    for one, number in ((before, 0), (after, 1)):
        assert (one["subject"], one["sync"], one["not_answered"]) == ("rollout", number, "")
        assert (one["computes"], one["kv_held"]) == ("fp16", ["fp16"])
        assert all(dtypes.keys() == {"fp16"} for dtypes in one["kinds"].values())
    assert before["kinds"] == after["kinds"]
    assert before["weights"]["exact"] != after["weights"]["exact"]
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(audits)])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "sent, rank 0: policy, sync 1; float16 asked" in said
    assert f"held, {after['name']}: rollout, vllm 0.30.0" in said
    assert "sync 1: exact in bf16: " in said
