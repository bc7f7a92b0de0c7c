"""The ranks of a model decide alike: pipeline stages, and the parts of a tensor."""

from __future__ import annotations

import pytest

from ..processes.rank_server import Ranks, serving
from .training import SCALE

pytestmark = pytest.mark.usefixtures("megatron_core")
launch = serving("tests.megatron_alone.stage_ranks")


def test_megatron_fsdp(launch: Ranks) -> None:
    """The NaN check would end the job on the stage that has no fp16 parameters."""
    assert launch("fsdp", parallel={"pipeline_model_parallel_size": 2}) == [False, False]


@pytest.mark.parametrize(("case", "stages"), [("fsdp", 1), ("fsdp", 2), ("alone", 1)])
def test_a_rank_without_the_shim_is_named(launch: Ranks, case: str, stages: int) -> None:
    """Before the stages gather their dtypes, and before only this rank lets overflows pass."""
    told, _ = launch(case, parallel={"pipeline_model_parallel_size": stages}, only=0)
    assert "of 2 ranks, rank 1: without the shim" in str(told)


def test_an_unscaled_loss_is_told_on_the_last_stage(launch: Ranks) -> None:
    """The other stages have no loss; the last has it in its last virtual stage."""
    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    first, (told,) = launch("unscaled", parallel=stages)
    assert first == []
    assert "the loss was not scaled in this step" in told


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "not distributed"])
def test_an_overflow_in_one_part_of_a_tensor(launch: Ranks, distributed: bool) -> None:
    """Only one of two tensor-parallel ranks has the overflow; both skip, and lower the scale."""
    parallel = {"tensor_model_parallel_size": 2}
    for rank in launch("tensors", parallel=parallel, distributed=distributed):
        assert rank["skipped"] == [False, True, False]
        assert rank["moved"] == [True, False, True]
        assert [one["skipped_steps"] for one in rank["metrics"]] == [0.0, 1.0, 1.0]
        assert [one["loss_scale"] for one in rank["metrics"]] == [SCALE, SCALE, SCALE / 2]
