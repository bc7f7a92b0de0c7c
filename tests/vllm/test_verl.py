"""verl's real trainer and the real vLLM: the engine's weights after a sync, bit by bit.

tests/rl has whole runs of verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ..processes.rank_server import rank_server
from ..stand_ins.tiny_models import make_checkpoint

NAMES = ("float16", "bfloat16", "float32")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The engine's weights, by the rollout's dtype."""
    folder = tmp_path_factory.mktemp("ranks")
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("model"), width=64)
    jobs = {name: {"dtype": name} for name in NAMES}
    with rank_server("tests.vllm.verl_ranks", folder, MODEL=str(checkpoint)) as ranks:
        (one,) = ranks("synced", world=1, **jobs)
        yield one


@pytest.mark.parametrize("dtype", NAMES)
def test_the_engine_holds_the_trainers_weights_rounded_once(
    found: dict[str, Any], dtype: str
) -> None:
    job = found[dtype]
    assert job["dtypes"] == [f"torch.{dtype}"]
    assert job["changed"]
    assert "once" in job["way"]
    assert (job["on bf16's grid"] == 1.0) is (dtype == "bfloat16")
