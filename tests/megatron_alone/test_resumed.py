"""Loss scaling over a save and a resume, where Megatron's own state does not suffice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import precision_shim

from ..audit.offloading import OFFLOAD, READABLE, same_stepped, stepped
from ..stand_ins.fake_gpu import FakeGpu
from ..testing import tiny_training
from .training import OVERFLOW, SCALE, Trainer, fp16

On = Callable[..., Any]


@pytest.fixture
def gpu(one_process: Any) -> Iterator[FakeGpu]:
    with FakeGpu() as gpu:
        yield gpu


def test_a_shorter_growth_interval_is_reached(on: On, one_process: Any, tmp_path: Path) -> None:
    """Megatron's scale grows where the tracker equals the interval, not above it."""

    def resumed() -> list[float]:
        second = Trainer.of(fp16(loss_scale_window=3))
        tiny_training.load(second.chunks, second.optimizer, tmp_path)
        scales = []
        for number in range(5, 9):
            second.plain(number)
            scales.append(float(second.scalers[0].scale))
        return scales

    first = Trainer.of(fp16(loss_scale_window=10))
    for number in range(5):
        first.plain(number)
    tiny_training.save(first.chunks, first.optimizer, tmp_path, "dp_reshardable")
    assert resumed() == [SCALE] * 4
    on()
    assert resumed() == [SCALE * 2, SCALE * 2, SCALE * 2, SCALE * 4]
    chosen = [one["chosen"] for one in precision_shim.status().to_dict()["decisions"]]
    assert "growth tracker 2 and not 5: it grows next step" in chosen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("sharding", "fraction", "aware"),
    [
        (READABLE[0], 0.5, True),
        (READABLE[0], 0.0, True),
        (READABLE[1], 1.0, True),
        (READABLE[1], 0.5, False),
    ],
)
def test_an_offloaded_optimizer_is_saved_while_each_step_was_skipped(
    on: On, gpu: FakeGpu, tmp_path: Path, sharding: str, fraction: float, aware: bool
) -> None:
    """Its states are made, and the next step is the first all the same."""
    fields: dict[str, Any] = OFFLOAD | {"optimizer_offload_fraction": fraction}
    if aware:
        fields |= {"use_precision_aware_optimizer": True, "store_param_remainders": False}

    def skipped() -> Trainer:
        made = Trainer.of(fp16(weight_decay=0.1, **fields))
        assert math.isnan(made.plain(0, OVERFLOW))
        return made

    def go_on(one: Trainer) -> Any:
        return [one.plain(number) for number in (1, 2)], stepped(one.optimizer)

    norms, states = go_on(skipped())
    on()
    first = skipped()
    tiny_training.save(first.chunks, first.optimizer, tmp_path, sharding)
    found, after = go_on(first)
    assert found == norms
    assert same_stepped(after, states)
    if aware:  # otherwise Megatron cannot load what it saves: docs/megatron.md
        second = Trainer.of(fp16(weight_decay=0.1, **fields))
        tiny_training.load(second.chunks, second.optimizer, tmp_path)
        found, after = go_on(second)
        assert found == norms
        assert same_stepped(after, states)
