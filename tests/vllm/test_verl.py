"""verl's real trainer and the real vLLM: the engine's weights after a sync, bit by bit.

tests/rl has whole runs of verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from packaging.version import Version

from ..rank_server import rank_server
from ..tiny_models import make_checkpoint
from ..verl.conftest import VERL

ROUNDS = Version("0.9") > VERL
"""Whether verl itself rounds every weight to bf16 before it sends the weights."""

NAMES = ("float16", "bfloat16", "float32")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The engine's weights, by the rollout's dtype, with the shim and without it."""
    folder = tmp_path_factory.mktemp("ranks")
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("model"), width=64)
    jobs = {
        f"{name}, {word}": {"on": word == "on", "dtype": name}
        for word in ("off", "on")
        for name in NAMES
    }
    with rank_server("tests.vllm.verl_ranks", folder, MODEL=str(checkpoint)) as ranks:
        (one,) = ranks("synced", world=1, **jobs)
        yield one


@pytest.mark.parametrize("dtype", NAMES)
def test_the_engine_holds_the_trainers_weights_rounded_once(
    found: dict[str, Any], dtype: str
) -> None:
    job = found[f"{dtype}, on"]
    assert job["dtypes"] == [f"torch.{dtype}"]
    assert job["changed"]
    assert "once" in job["way"]
    assert (job["on bf16's grid"] == 1.0) is (dtype == "bfloat16")


@pytest.mark.parametrize("dtype", NAMES)
def test_without_the_shim_they_came_over_bf16_where_verl_rounds(
    found: dict[str, Any], dtype: str
) -> None:
    job = found[f"{dtype}, off"]
    assert job["dtypes"] == [f"torch.{dtype}"]
    assert job["changed"]
    assert ("over bf16" if ROUNDS else "once") in job["way"]
    assert (job["on bf16's grid"] == 1.0) is (ROUNDS or dtype == "bfloat16")
