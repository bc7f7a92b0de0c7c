"""A step in fp16 that an exception ended, and that the trainer repeats with the same gradients.

The right result is that of a trainer whose step no exception ended. Gradients are not clipped,
because a repeated step would clip clipped ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from precision_shim_adapters.megatron import metrics

from ..rank_server import Ranks, rank_server
from .training import OVERFLOW, Trainer, fp16

On = Callable[..., Any]


def build(**config: Any) -> Any:
    return fp16(clip_grad=0.0, loss_scale_window=4, **config)


@contextlib.contextmanager
def failing(owner: Any, name: str, *, after: bool = False) -> Iterator[None]:
    """Let a method raise an exception, before or after it has done its work."""
    own = getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> None:
        if after:
            own(*args, **kwargs)
        raise OSError("interrupted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="interrupted"):
            yield


def state(trainer: Trainer) -> Any:
    return [one.state_dict() for one in trainer.scalers], metrics(trainer.optimizer)


def place_of(trainer: Trainer, place: str) -> tuple[Any, str, bool]:
    """Where an exception ends a step; the last in the order of a step comes last."""
    first, second = trainer.optimizer.chained_optimizers
    return {
        "copy of the first": (first, "_copy_model_grads_to_main_grads", True),
        "all ranks of the first": (torch.distributed, "all_reduce", False),
        "scaler of the first": (first.grad_scaler, "update", False),
        "copy of the second": (second, "_copy_model_grads_to_main_grads", False),
        "check of the second": (second, "_unscale_main_grads_and_check_for_nan", True),
        "norm": (trainer.optimizer, "get_grad_norm", True),
        "update of the first": (first.optimizer, "step", False),
        "update of the second": (second.optimizer, "step", False),
        "weights of the second": (second, "_copy_main_params_to_model_params", False),
    }[place]


PLACES = (
    "copy of the first",
    "all ranks of the first",
    "scaler of the first",
    "copy of the second",
    "check of the second",
    "norm",
    "update of the first",
    "update of the second",
)


@pytest.mark.parametrize("weight", [1.0, OVERFLOW], ids=["finite", "overflow"])
@pytest.mark.parametrize(
    ("again", "fp32_bucket"),
    [
        pytest.param("the step", True, id="the step"),
        pytest.param("the step", False, id="the step, fp16 bucket", marks=pytest.mark.slow),
        pytest.param("the batch", True, id="the batch", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_a_chain(
    on: On, one_process: Any, place: str, fp32_bucket: bool, again: str, weight: float
) -> None:
    """Only what the exception left undone of a chain's optimizers is done."""
    if weight == OVERFLOW and place in PLACES[5:]:
        pytest.skip("a skipped step does not come there")
    if again == "the batch" and place == "update of the second":
        pytest.skip("the first has stepped")
    on(features="fp16-scaling")
    one = build(fp32_bucket=fp32_bucket, hysteresis=1)
    right, made = Trainer.of(one, 2), Trainer.of(one, 2)
    for number in range(3):
        right.plain(number)
        made.plain(number)
    right.backward(3, weight)
    expected = right.optimizer.step()
    made.backward(3, weight)
    owner, name, after = place_of(made, place)
    with failing(owner, name, after=after):
        made.optimizer.step()
    if again == "the batch":
        made.backward(3, weight)
    assert made.optimizer.step() == expected
    (scalers, figures), (others, same) = state(right), state(made)
    if again == "the batch" and weight == OVERFLOW:
        # An overflow that was found counts, also if an exception came after it.
        assert [one.pop("scale") <= 1024 for one in others] == [True] * 2
    else:
        assert (scalers, figures) == (others, same)
        assert all(map(torch.equal, right.parameters(), made.parameters()))
        for number in range(4, 7):
            assert right.plain(number) == made.plain(number)
        assert state(right) == state(made)
        assert all(map(torch.equal, right.parameters(), made.parameters()))


@pytest.mark.parametrize("place", ["copy of the second", "check of the second"])
def test_an_overflow_counts_in_all_parts_of_a_chain(on: On, one_process: Any, place: str) -> None:
    """The trainer repeats only ``prepare_grads``, and skips the step by ``zero_grad``."""
    on(features="fp16-scaling")
    right, made = (Trainer.of(build(hysteresis=2), 2) for _ in range(2))
    for trainer in (right, made):
        trainer.plain(0)
        trainer.backward(1, OVERFLOW)
    owner, name, after = place_of(made, place)
    with failing(owner, name, after=after):
        made.optimizer.prepare_grads()
    for trainer in (right, made):
        assert trainer.optimizer.prepare_grads()
        trainer.optimizer.zero_grad()
    assert state(right) == state(made)
    assert right.plain(2) == made.plain(2)
    assert state(right) == state(made)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with rank_server("tests.megatron_alone.repeated_ranks", tmp_path_factory.mktemp("r")) as ranks:
        yield ranks


@pytest.mark.parametrize("place", ["norm", "update"])
@pytest.mark.parametrize(
    ("stages", "distributed"),
    [(2, True), (2, False), (1, False)],
    ids=["stages", "stages, whole states", "data-parallel"],
)
@pytest.mark.slow
def test_several_ranks(launch: Ranks, stages: int, distributed: bool, place: str) -> None:
    """An exception ends a step on rank 1, rank 0 completes it, and both ranks call it again."""
    every = launch("repeated", stages=stages, distributed=distributed, place=place)
    for one in every:
        assert one["found"] == one["expected"]
        assert one["equal"]
        assert one["states"][0] == one["states"][1]
        assert one["states"] == every[0]["states"]
    assert [len(one["said"]) for one in every] == [1, 0]
