"""The meter on groups with frozen parameters, without gradients, and of several dtypes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import precision_shim
from precision_shim.errors import PrecisionShimWarning
from precision_shim_tools.testing import FusedAdam


@pytest.fixture(autouse=True)
def no_warning_is_an_error_here() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionShimWarning)
        yield
    precision_shim.uninstall()


def weights(*shape: int, dtype: torch.dtype = torch.bfloat16, trains: bool = True) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.nn.Parameter(torch.randn(shape).to(dtype), requires_grad=trains)


def step(optimizer: torch.optim.Optimizer, *trained: torch.Tensor) -> None:
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_frozen_parameters_of_a_group_take_no_part() -> None:
    """verl passes a LoRA model's frozen parameters to the optimizer, too."""
    frozen = [weights(512, 512, trains=False) for _ in range(4)]
    adapter, other = weights(64, 64), weights(64, 64, dtype=torch.float32)
    optimizer = torch.optim.AdamW([{"params": [*frozen, adapter]}, {"params": [other]}], lr=1e-5)
    watch = precision_shim.watch_updates(None, optimizer, every=1)
    for _ in range(3):
        step(optimizer, adapter, other)
    (figures,) = watch.figures()
    first, second = figures["groups"]
    for group in (first, second):
        assert group["elements"] == group["sampled"] == group["weights"]["updates"] == 64 * 64
    lost = first["weights"]["lost"] + second["weights"]["lost"]
    assert figures["weights"] == watch.metrics()["updates_lost"] == lost / (2 * 64 * 64)
    assert figures["weights"] < 0.51 < first["weights"]["lost"] / (64 * 64)


def test_a_parameter_without_a_gradient_in_this_step_takes_no_part() -> None:
    """As experts without a token do."""
    used, unused = weights(64, 64), weights(512, 64)
    other = weights(64, 64, dtype=torch.float32)
    optimizer = torch.optim.AdamW([{"params": [used, unused]}, {"params": [other]}], lr=1e-5)
    watch = precision_shim.watch_updates(None, optimizer, every=1)
    for _ in range(3):
        step(optimizer, used, other)
    assert [group["elements"] for group in watch.figures()[0]["groups"]] == [64 * 64, 64 * 64]
    step(optimizer, used, unused, other)
    step(optimizer, used, unused, other)
    assert [group["elements"] for group in watch.figures()[0]["groups"]] == [576 * 64, 64 * 64]


def test_masters_that_need_no_gradient_are_measured() -> None:
    """Megatron's masters get a gradient before each step, and do not require it."""
    master, late = (weights(8, 8, dtype=torch.float32, trains=False) for _ in range(2))
    optimizer = torch.optim.SGD([master, late], lr=0.1)
    watch = precision_shim.watch_updates(None, optimizer, every=1)
    step(optimizer, master)
    master.grad = None
    step(optimizer, late)
    step(optimizer, late)
    (figures,) = watch.figures()
    assert [group["elements"] for group in figures["groups"]] == [64]
    assert figures["groups"][0]["weights"] == {"dtype": "fp32", "updates": 64, "lost": 0}


def test_bf16_weights_beside_fp32_norms_get_the_remedy_of_16_bits() -> None:
    matrix, norm = weights(64, 64), weights(64, dtype=torch.float32)
    optimizer = torch.optim.AdamW([matrix, norm], lr=1e-6)
    precision_shim.watch_updates(None, optimizer, every=1)
    for _ in range(2):
        step(optimizer, matrix, norm)
    audit = precision_shim.audit(None, optimizer)
    (note,) = (note for note in audit.notes if note.code == "updates-lost")
    assert note.component == "params"
    assert "stored weights (bf16, fp32) were rounded away" in note.message
    assert "Keep the bf16 weights in fp32" in note.message
    assert "no dtype helps" not in note.message


def test_lost_updates_of_fp32_masters_are_the_masters() -> None:
    parameter = weights(64, 64)
    optimizer = FusedAdam([parameter], lr=1e-10, master_weights=True, weight_decay=0.0)
    precision_shim.watch_updates(None, optimizer, every=1)
    for _ in range(2):
        step(optimizer, parameter)
    audit = precision_shim.audit(None, optimizer)
    (note,) = (note for note in audit.notes if note.code == "updates-lost")
    assert note.component == "master"
    assert "(fp32)" in note.message
