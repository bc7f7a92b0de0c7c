"""SkyRL's delta sync into the real vLLM: the engine's weights, bit by bit.

SkyRL's other syncs (nccl, ipc) need CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ..rank_server import Ranks, rank_server

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
