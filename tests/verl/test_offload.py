"""verl moves the optimizer's states to the CPU between its phases, and back."""

from __future__ import annotations

import pytest
from packaging.version import Version

from ..stand_ins.optimizer_states import hold_masters_to_moments
from .conftest import VERL
from .test_checkpoints import job, same, shim

pytestmark = pytest.mark.skipif(
    Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
)


def test_masters_move_with_the_moments(fused_adam: str, moves: list[tuple[int, str]]) -> None:
    from verl.utils import megatron_utils as verl

    with shim(on=True):
        one = job()
        one.train(1)
        functions = (verl.offload_megatron_optimizer, verl.load_megatron_optimizer)
        hold_masters_to_moments(one.optimizer, moves, *functions)


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
