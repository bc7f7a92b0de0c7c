"""Two processes over gloo skip the same steps, and a resumed worker continues bit for bit."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..processes.rank_server import Ranks
from ..stand_ins.tiny_models import make_checkpoint
from .support import KINDS

pytestmark = pytest.mark.slow

Trained = Callable[[str, dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(ranks: Ranks, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The results of each rank for a kind of worker.

    All kinds train one after the other in the same processes, to save imports. If a kind
    fails, the launch fails, and each kind is then launched alone.
    """
    models = {kind: str(model) for kind in KINDS}
    if "value" in models:
        # This checkpoint has a value head, because nemo_automodel would initialize a missing value
        # head in one process only, and leave uninitialized memory in the others.
        models["value"] = str(make_checkpoint(tmp_path_factory.mktemp("value"), value_head=True))

    @functools.cache
    def together(dtensor: str) -> Any:
        try:
            return ranks("train", models=models, on=True, dtensor=json.loads(dtensor))
        except AssertionError:
            return None

    def of(kind: str, dtensor: dict[str, Any]) -> list[dict[str, Any]]:
        found = together(json.dumps(dtensor)) or ranks(
            "train", models={kind: models[kind]}, on=True, dtensor=dtensor
        )
        return [one[kind] for one in found]

    return of


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "dtensor",
    [
        pytest.param({}, id="data parallel", marks=pytest.mark.oldest),
        pytest.param({"cpu_offload": True}, id="CPU offload"),
        pytest.param({"tensor_parallel_size": 2}, id="tensor parallel"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_skip_together_and_resume(
    trained: Trained, kind: str, dtensor: dict[str, Any]
) -> None:
    found = trained(kind, dtensor)
    scales = [step["scale"] for step in found[0]["steps"]]
    assert scales == [65536.0, 32768.0, 32768.0, 65536.0]
    for one in found:
        assert [step["scale"] for step in one["steps"]] == scales
        assert [step["skipped"] for step in one["steps"]] == [0, 1, 1, 1]
        assert one["steps"][1]["norm"] == "nan"
        assert one["parameters"] == found[0]["parameters"]
        assert one["finite"]
        assert one["same"]
        assert one["resumed"] == one["steps"][-1]
    assert found[0]["steps"][1]["metrics"] == [[65536.0], [1.0]]
    assert found[1]["steps"][1]["metrics"] == [None, None]  # NeMo-RL sums metrics over ranks


@pytest.mark.oldest
@pytest.mark.timeout(900)
def test_two_ranks_without_the_shim_are_destroyed(ranks: Ranks, model: Path) -> None:
    found = ranks("train", models={"v1": str(model)}, on=False, dtensor={})
    assert not found[0]["v1"]["finite"]
