"""The worked adapter for a trainer on Megatron-core: all four features, on real objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim_tools.testing import (
    measure_bytes,
    megatron_on_cpu,
    model_parallel,
    stand_in_transformer_engine,
    tiny_gpt,
)

pytest.importorskip("megatron.core", reason="Megatron-core is not installed in this environment")

BF16_STATES = {
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "exp_avg_dtype": "BFloat16",
    "exp_avg_sq_dtype": "torch.bfloat16",
    "adam_beta2": 0.95,
}
OVERFLOW = 1e30


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    """Megatron on a CPU, with the stand-in for TransformerEngine's FusedAdam."""
    with ExitStack() as stack:
        stack.enter_context(stand_in_transformer_engine("2.11.0"))
        stack.enter_context(megatron_on_cpu())
        stack.enter_context(model_parallel())
        yield


def trainer(precision: str = "bfloat16", **config: Any) -> Any:
    from tinytron.trainer import Config, Trainer

    torch.manual_seed(0)
    return Trainer(Config(precision, **config), tiny_gpt(getattr(torch, precision)))


def step(made: Any, number: int, weight: float = 1.0) -> dict[str, float]:
    """Take a step on batch ``number``."""
    generator = torch.Generator().manual_seed(number)
    return dict(made.train_step(torch.randint(0, 32, (2, 8), generator=generator), weight))


def fields(made: Any) -> dict[str, Any]:
    """The fields of the live optimizer's OptimizerConfig."""
    return vars(made.optimizer.chained_optimizers[0].config)


def parameters(made: Any) -> list[torch.Tensor]:
    return [one.detach().clone() for one in made.model.module.parameters()]


def test_dtype_names_work(on: Callable[..., Any]) -> None:
    with pytest.raises((RuntimeError, AssertionError, TypeError, KeyError)):
        step(trainer(optimizer=BF16_STATES), 0)
    on("tinytron")
    made = trainer(optimizer=BF16_STATES)
    step(made, 0)
    assert fields(made)["exp_avg_dtype"] is torch.bfloat16
    with pytest.raises(precision_shim.DtypeError, match="exp_avg_dtype"):
        trainer(optimizer={**BF16_STATES, "exp_avg_dtype": "bf17"})


def test_states_and_bucket_follow_the_model(on: Callable[..., Any]) -> None:
    made = trainer()
    step(made, 0)
    assert measure_bytes([made.model], made.optimizer).per_parameter == 18
    on("tinytron", optimizer_states="follow-model")
    made = trainer(optimizer={"adam_beta2": 0.95})
    step(made, 0)
    assert measure_bytes([made.model], made.optimizer).per_parameter == 10
    decisions = [one.subject for one in precision_shim.status().decisions]
    assert "model" in decisions


def test_fp16_skips_counts_and_resumes(on: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the optimizer's step failed"):
        step(trainer("float16"), 0, OVERFLOW)
    on("tinytron", loss_scale_init=1024.0)
    whole = trainer("float16")
    for number in range(4):
        before = parameters(whole)
        found = step(whole, number, OVERFLOW if number == 1 else 1.0)
        same = all(torch.equal(*pair) for pair in zip(before, parameters(whole), strict=True))
        assert same == (number == 1)
        assert math.isnan(found["grad_norm"]) == (number == 1)
        assert found["skipped_steps"] == (number >= 1)
    half = trainer("float16")
    for number in range(2):
        step(half, number, OVERFLOW if number == 1 else 1.0)
    half.save(str(tmp_path))
    resumed = trainer("float16")
    resumed.load(str(tmp_path))
    for number in range(2, 4):
        step(resumed, number)
    assert all(
        torch.equal(*pair) for pair in zip(parameters(whole), parameters(resumed), strict=True)
    )
    assert resumed.optimizer.get_loss_scale() == whole.optimizer.get_loss_scale()


def test_strict_refuses_a_trainer_that_it_does_not_know(
    on: Callable[..., Any], changed: Callable[[str, str, str], None]
) -> None:
    changed("tinytron.trainer", "def train_step(", "def train(")
    on("tinytron")
    with pytest.raises(precision_shim.SeamError, match="train_step"):
        trainer()
