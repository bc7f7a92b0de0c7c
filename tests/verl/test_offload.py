"""verl moves the optimizer's states to the CPU between its phases, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version

from .conftest import VERL
from .test_checkpoints import job, same, shim

pytestmark = pytest.mark.skipif(
    Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
)


def masters(one: Any) -> list[torch.Tensor]:
    return [
        state["master_param"]
        for inner in one.optimizer.chained_optimizers
        for state in inner.optimizer.state.values()
    ]


def test_masters_move_with_the_moments(fused_adam: str, moves: list[tuple[int, str]]) -> None:
    from verl.utils import megatron_utils as verl

    with shim(on=True):
        one = job()
        one.train(1)
        kept = {id(master) for master in masters(one)}
        assert kept
        del moves[:]
        verl.offload_megatron_optimizer(one.optimizer)
        assert kept <= {tensor for tensor, where in moves if where == "cpu"}
        back = {id(master) for master in masters(one)}
        del moves[:]
        verl.load_megatron_optimizer(one.optimizer)
        assert back <= {tensor for tensor, _ in moves}


@pytest.mark.parametrize("steps", [0, 2])
def test_training_goes_on_as_if_nothing_moved(fused_adam: str, steps: int) -> None:
    from verl.utils import megatron_utils as verl

    with shim(on=True):
        straight, offloaded = job(), job()
        assert straight.train(steps) == offloaded.train(steps)
        verl.offload_megatron_optimizer(offloaded.optimizer)
        verl.load_megatron_optimizer(offloaded.optimizer)
        assert straight.train(3, first=steps) == offloaded.train(3, first=steps)
        assert same(straight.states(), offloaded.states())
