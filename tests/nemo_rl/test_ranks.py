"""Two processes over gloo skip the same steps, and a resumed worker continues bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..processes.rank_server import Ranks
from ..stand_ins.tiny_models import make_checkpoint
from .support import KINDS

pytestmark = pytest.mark.slow

Trained = Callable[[bool], list[dict[str, Any]]]
OTHERS = {"CPU offload": {"cpu_offload": True}, "tensor parallel": {"tensor_parallel_size": 2}}
"""Keys of ``dtensor_cfg``, by what they select in the place of data parallelism alone."""


@pytest.fixture(scope="module")
def trained(ranks: Ranks, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The results of each rank by kind and by name of the case.

    Many workers train one after the other in the same processes, to save imports.
    """
    # This checkpoint has a value head, because nemo_automodel would initialize a missing value
    # head in one process only, and leave uninitialized memory in the others.
    value = make_checkpoint(tmp_path_factory.mktemp("value"), value_head=True)

    @functools.cache
    def launched(others: bool) -> list[dict[str, Any]]:
        if others:
            jobs = [(kind, model, each) for kind in ("v1", "v2") for each in OTHERS.items()]
        else:
            models = {"value": value}
            jobs = [(kind, models.get(kind, model), ("data parallel", {})) for kind in KINDS]
        given = {
            f"{kind} {name}": [kind, str(path), dtensor] for kind, path, (name, dtensor) in jobs
        }
        return ranks("train", jobs=given)

    return launched


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *((kind, "data parallel") for kind in KINDS),
        *((kind, case) for kind in ("v1", "v2") for case in OTHERS),
    ],
)
def test_two_ranks_skip_together_and_resume(trained: Trained, kind: str, case: str) -> None:
    found = [one[f"{kind} {case}"] for one in trained(case in OTHERS)]
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
