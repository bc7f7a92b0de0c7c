"""Expert parallelism over two ranks on verl's Automodel and torchtitan engines, in fp16.

Each rank has half of the experts, and each token goes to the rank that has its experts. VeOmni's
experts need a GPU's kernels then, and are not run here.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from packaging.version import Version

from ..processes.rank_server import Ranks
from .conftest import VERL
from .test_engines import SINCE, same

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("veomni", "nemo_automodel")),
    reason="the packages of these engines are in an environment of their own",
)

PARALLEL = {"automodel": {"ep_size": 2}, "torchtitan": {"expert_parallel_size": 2}}
ENGINES = [name for name in PARALLEL if Version(SINCE[name]) <= VERL]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of four experts in each layer."""
    from .engine_support import make_model

    return str(make_model(tmp_path_factory.mktemp("qwen3-moe"), experts=True))


@pytest.mark.parametrize("name", ENGINES)
def test_it_equals_a_loop_by_hand_and_resumes(
    engine_ranks: Ranks, model: str, name: str, tmp_path: Path
) -> None:
    """Both ranks skip the same two steps; a resume in new processes continues bit for bit."""
    given = {"model": model, "name": name, **PARALLEL[name]}
    told = {"at": 4, "overflows": [2, 5], **given}
    hand = engine_ranks("by_hand", **given)
    straight = engine_ranks("saved", folder=tmp_path, **told)
    gone_on = engine_ranks("resumed", folder=tmp_path, **told)
    for ours, theirs, second in zip(straight, hand, gone_on, strict=True):
        same(ours, theirs)
        assert ours["after"] == ours["before"]
        assert second["loaded"] == ours["before"]
        assert second["state"] == ours["state"]
        assert second["predicted"] == "exact"
    for key in ("scale", "tracker", "counter"):
        assert straight[0]["state"][key] == straight[1]["state"][key]
    # Each rank has other experts.
    assert straight[0]["state"]["parameters"] != straight[1]["state"]["parameters"]


def test_rounded_weights_are_said(engine_ranks: Ranks, model: str) -> None:
    """verl's default of ``model_dtype`` is fp32; Automodel's own models have bf16 weights."""
    (ours, _) = engine_ranks("built", model=model, asked=[["automodel", PARALLEL["automodel"]]])
    (said,) = ours[0]["said"]
    assert "model_dtype='fp32', but the weights of" in said
    assert "torch.bfloat16" in said
    (alone,) = engine_ranks("built", world=1, model=model, asked=[["automodel", {}]])
    assert alone[0]["said"] == []
