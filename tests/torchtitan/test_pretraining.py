"""``Trainer`` in float16, through its own ``__init__``, ``train_step`` and ``train``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.errors import PrecisionShimWarning, UnsupportedPrecisionError
from precision_shim_adapters.torch_fp16.stepping import ScaledLoss

from . import by_hand, cpu
from .test_rl import decisions, equal

STEPS = 8
OVERFLOWS = (2, 5)
SETTINGS = {"growth_interval": 2, "loss_scale_init": 1024}


class Overflows:
    """A loss that is multiplied by a large factor in some steps."""

    def __init__(self, own: Any, factor: float = 1e30) -> None:
        self.own, self.factor, self.on = own, factor, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.own(*args, **kwargs)
        if not self.on:
            return found
        if isinstance(found, torch.Tensor):  # a pipeline's schedule returns the loss alone
            return found * self.factor
        return found[0] * self.factor, found[1]

    @classmethod
    def beneath(cls, trainer: Any, schedule: Any = None) -> Any:
        """Insert an ``Overflows`` at the innermost loss, beneath the shim's loss if it exists."""
        owner, name = trainer, "loss_fn"
        if hasattr(trainer.loss_fn, "num_chunks"):
            owner = trainer.loss_fn
        elif schedule is not None:
            owner, name = schedule, "_loss_fn"
        held = getattr(owner, name)
        if held is None:  # only the last pipeline stage has a loss
            return None
        beneath = held.__wrapped__ if isinstance(held, ScaledLoss) else held
        if isinstance(beneath, cls):
            return beneath
        found = cls(beneath)
        if isinstance(held, ScaledLoss):
            held.__wrapped__ = found
        else:
            setattr(owner, name, found)
        return found


def logged(trainer: Any) -> list[dict[str, float]]:
    """A list to which the trainer appends its metrics of each later step."""
    found: list[dict[str, float]] = []
    trainer.metrics_processor.logger.log = lambda metrics, step: found.append(dict(metrics))
    return found


def train(
    trainer: Any, steps: int, overflows: Sequence[int] = (), factor: float = 1e30
) -> list[dict[str, float]]:
    """Take steps by ``train_step``; the steps in ``overflows`` have an overflow."""
    found = logged(trainer)
    data = trainer.batch_generator(trainer.dataloader)
    loss = Overflows.beneath(trainer)
    loss.factor = factor
    for step in range(steps):
        loss.on = step in overflows
        trainer.step += 1
        trainer.train_step(data)
    return found


@pytest.mark.parametrize("chunks", [None, 2], ids=["plain", "chunked"])
def test_it_is_the_loop_by_hand_bit_for_bit(pretrainer: Any, shim: Any, chunks: int | None) -> None:
    with by_hand.attention_in_float16():
        hand = pretrainer(chunks=chunks, parts=2)
    overflow = Overflows.beneath(hand)
    scaler = by_hand.scaler(1024.0, 2)
    data = hand.batch_generator(hand.dataloader)
    expected = []
    for step in range(STEPS):
        overflow.on = step in OVERFLOWS
        expected.append(by_hand.train_step(hand, scaler, data))

    shim(settings=SETTINGS)
    trainer = pretrainer(chunks=chunks, parts=2)
    found = train(trainer, STEPS, OVERFLOWS)

    skipped = 0
    for step, (norm, scale, loss) in enumerate(expected):
        metrics = found[step]
        skipped += step in OVERFLOWS
        if step in OVERFLOWS:
            assert math.isnan(metrics["grad_norm"])
        else:
            assert metrics["grad_norm"] == norm
        assert metrics["loss_scale"] == scale
        assert metrics["skipped_steps"] == skipped
        # The loop by hand returns the scaled loss; dividing by a power of two is exact.
        assert metrics["loss_metrics/global_avg_loss"] == loss / scale
    assert equal(cpu.values(trainer), cpu.values(hand))
    assert trainer.lr_schedulers.state_dict() == hand.lr_schedulers.state_dict()


@pytest.mark.parametrize(("dtype", "chunks"), [("bfloat16", 2), ("float32", None)])
def test_other_dtypes_are_left_alone(
    pretrainer: Any, shim: Any, dtype: str, chunks: int | None
) -> None:
    def run() -> tuple[list[dict[str, float]], dict[str, Any]]:
        trainer = pretrainer(dtype, chunks=chunks, parts=2)
        return train(trainer, 2), cpu.values(trainer)

    def told(found: list[dict[str, float]]) -> list[dict[str, float]]:
        same = ("loss", "grad_norm", "n_tokens", "lr")
        return [{k: v for k, v in one.items() if k.startswith(same)} for one in found]

    expected, values = run()
    shim()
    found, ours = run()
    assert [one.keys() for one in found] == [one.keys() for one in expected]
    assert told(found) == told(expected)
    assert equal(ours, values)
    assert not decisions()


def test_a_skip_updates_the_experts_bias(pretrainer: Any, shim: Any) -> None:
    """Parameters and moments stay; the token counts, which no checkpoint contains, are reset."""
    shim()
    trainer = pretrainer(experts=True)
    train(trainer, 1)
    before = cpu.values(trainer)
    train(trainer, 1, (0,))
    after = cpu.values(trainer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("expert_bias" in name for name in changed)
    counts = [one for name, one in after.items() if "tokens_per_expert" in name]
    assert counts
    assert all(not one.any() for one in counts)


def test_a_loop_of_ones_own_is_not_scaled(pretrainer: Any, shim: Any) -> None:
    """verl's engine builds a Trainer and runs its own loop, which never unscales gradients."""
    with by_hand.attention_in_float16():
        alone = _forward_backward(pretrainer())
    shim()
    trainer = pretrainer()
    with pytest.warns(PrecisionShimWarning, match="outside of its train_step"):
        ours = _forward_backward(trainer)
    assert torch.equal(ours, alone)


def _forward_backward(trainer: Any) -> torch.Tensor:
    inputs, labels = next(trainer.batch_generator(trainer.dataloader))
    trainer.forward_backward_step(
        input_dict=dict(inputs), labels=labels, global_valid_tokens=torch.tensor(labels.numel())
    )
    return torch.cat([cpu.local(p.grad).flatten() for p in trainer.model_parts[0].parameters()])


@pytest.mark.parametrize("method", ["train_step", "forward_backward_step"])
def test_a_subclass_with_its_own_loop_is_refused_by_name(
    pretrainer: Any, shim: Any, method: str
) -> None:
    from dataclasses import dataclass

    from torchtitan.trainer import Trainer

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(Trainer, method)(self, *args, **kwargs)

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    kind = type("OwnLoop", (Trainer,), {method: own, "Config": Config})
    shim()
    with pytest.warns(PrecisionShimWarning, match=f"OwnLoop has its own {method}"):
        trainer = pretrainer(kind=kind)
    assert not decisions()
    train(trainer, 1)
    pretrainer("bfloat16", kind=kind)
    precision_shim.install(strict=True)
    with pytest.raises(precision_shim.PrecisionShimError, match=f"OwnLoop has its own {method}"):
        pretrainer(kind=kind)


def test_trainers_that_never_call_trainers_init(torchtitan: None, shim: Any, tmp_path: Any) -> None:
    """TorchFT's and Forge's own trainer classes are refused before anything is built."""
    from torchtitan.experiments.forge.engine import ForgeEngine
    from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer

    config = cpu.trainer_config(tmp_path)
    shim(strict=True)
    for kind in (FaultTolerantTrainer, ForgeEngine):
        with pytest.raises(UnsupportedPrecisionError, match=f"{kind.__name__} has its own __init"):
            kind(config)
    precision_shim.uninstall()
    shim()
    with (
        pytest.warns(PrecisionShimWarning, match="FaultTolerantTrainer has its own __init"),
        pytest.raises(AttributeError, match="fault_tolerance"),  # its __init__ reads this section
    ):
        FaultTolerantTrainer(config)


def test_the_graph_trainer_is_refused_by_name(torchtitan: None, shim: Any) -> None:
    from torchtitan.experiments.graph_trainer.trainer import GraphTrainer

    from precision_shim_adapters.torchtitan.training.pretraining import _has_our_loop

    shim()
    with pytest.warns(PrecisionShimWarning, match="GraphTrainer has its own train_step, forw"):
        assert not _has_our_loop(object.__new__(GraphTrainer))


def test_an_exception_between_two_passes_leaves_nothing(pretrainer: Any, shim: Any) -> None:
    """After an exception, the next steps equal those of a trainer without the exception."""
    shim(settings=SETTINGS)
    trainer = pretrainer(parts=2)
    own, calls = trainer.loss_fn.__wrapped__, 0

    def breaks(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("in the second pass")
        return own(*args, **kwargs)

    trainer.loss_fn.__wrapped__ = breaks
    with pytest.raises(MemoryError):
        train(trainer, 1)
    found = train(trainer, 2)
    other = pretrainer(parts=2)
    other.dataloader.given = 2
    assert [one["grad_norm"] for one in train(other, 2)] == [one["grad_norm"] for one in found]
    assert equal(cpu.values(trainer), cpu.values(other))
