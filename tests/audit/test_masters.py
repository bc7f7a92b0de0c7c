"""Weights loaded without the optimizer's states, and how the next step treats them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.precision.remainders import join_master

from ..stand_ins.fake_gpu import FakeGpu
from . import builds
from .offloading import OFFLOAD

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("verl", reason="an adapter on Megatron is woken by its framework")

BY_MEGATRON = {
    "bf16": builds.Build(),
    "fp16": builds.HONEST["fp16"],
    "bf16, not distributed": builds.HONEST["bf16, not distributed"],
}
"""Megatron's own ``reload_model_params`` updates the masters of these builds."""

LEFT_OUT = {
    "precision-aware, remainders": builds.HONEST["precision-aware"],
    "precision-aware, whole masters": builds.HONEST["precision-aware, whole masters"],
    "fp16, precision-aware": builds.HONEST["fp16, precision-aware"],
    "offload": builds.Build(config=OFFLOAD),
    "offload, half of it": builds.Build(config=OFFLOAD | {"optimizer_offload_fraction": 0.5}),
}
"""Megatron's own ``reload_model_params`` leaves out the masters of these builds."""

BUILDS = {
    **BY_MEGATRON,
    **LEFT_OUT,
    "offload, precision-aware": builds.Build(
        fp32_bucket=False,
        config=OFFLOAD | {"use_precision_aware_optimizer": True, "main_grads_dtype": builds.BF16},
    ),
}


@pytest.fixture
def gpu(one_process: Any) -> Iterator[FakeGpu]:
    with FakeGpu() as gpu:
        yield gpu


@pytest.fixture
def shim(gpu: FakeGpu) -> Iterator[Callable[..., precision_shim.Status]]:
    def install(*features: str) -> precision_shim.Status:
        return precision_shim.install(features=list(features) or None, export=False)

    try:
        yield install
    finally:
        precision_shim.uninstall()


def trained(build: builds.Build) -> tuple[list[Any], Any]:
    chunks, optimizer = builds.make(build)
    for _ in range(3):
        builds.step_without_forward(chunks, optimizer)
    return chunks, optimizer


def load_weights(chunks: list[Any], build: builds.Build) -> list[torch.Tensor]:
    """Copy another model's weights into the model, and nothing else."""
    others, _ = builds.make(build, seed=1)
    pairs = list(zip(chunks[0].parameters(), others[0].parameters(), strict=True))
    with torch.no_grad():
        for mine, other in pairs:
            mine.copy_(other)
    return [mine.detach().clone() for mine, _ in pairs]


def stand_still(chunks: list[Any], optimizer: Any) -> list[torch.Tensor]:
    """Take a step at learning rate 0, and return the weights."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    builds.step_without_forward(chunks, optimizer)
    return [one.detach().clone() for one in chunks[0].parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def reload(optimizer: Any) -> None:
    from precision_shim_adapters.megatron import reload_masters

    reload_masters("verl", "actor", optimizer)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_megatron_leaves_out(gpu: FakeGpu, name: str) -> None:
    """If this test fails, Megatron itself reloads all masters, and the seam can be deleted."""
    chunks, optimizer = trained(LEFT_OUT[name])
    load_weights(chunks, LEFT_OUT[name])
    optimizer.reload_model_params()
    assert not masters_are_the_weights(chunks, optimizer)


@pytest.mark.parametrize(
    ("name", "features"),
    [
        *((name, ()) for name in BUILDS),
        ("precision-aware, whole masters", ("bf16-dispatch",)),
        ("precision-aware, whole masters", ("fp16-scaling",)),
    ],
)
def test_the_next_step_goes_on_from_the_loaded_weights(
    shim: Any, name: str, features: tuple[str, ...]
) -> None:
    chunks, optimizer = trained(BUILDS[name])
    shim(*features)
    loaded = load_weights(chunks, BUILDS[name])
    reload(optimizer)
    assert masters_are_the_weights(chunks, optimizer)
    assert same(stand_still(chunks, optimizer), loaded)
    (said,) = (one for one in precision_shim.status().decisions if "masters" in one.chosen)
    assert said.subject == "actor"


@pytest.mark.parametrize("name", BUILDS)
def test_it_is_as_if_the_weights_had_been_there(shim: Any, name: str) -> None:
    """A step after a reload equals the step of another optimizer that got the same weights."""
    chunks, optimizer = trained(BUILDS[name])
    shim()
    reload(optimizer)  # masters rounded to the weights
    weights = [one.detach().clone() for one in chunks[0].parameters()]
    builds.step_without_forward(chunks, optimizer)
    straight = [one.detach().clone() for one in chunks[0].parameters()]

    again, other = trained(BUILDS[name])
    load_weights(again, BUILDS[name])
    with torch.no_grad():
        for one, value in zip(again[0].parameters(), weights, strict=True):
            one.copy_(value)
    reload(other)
    builds.step_without_forward(again, other)
    assert same(straight, [one.detach() for one in again[0].parameters()])


def test_a_chain_with_a_stub_and_no_optimizer_at_all(shim: Any) -> None:
    from megatron.core.optimizer import ChainedOptimizer

    shim()
    chunks, optimizer = trained(BUILDS["bf16"])
    (one,) = optimizer.chained_optimizers
    stub = type("Stub", (), {"optimizer": None})()
    chain = ChainedOptimizer.__new__(ChainedOptimizer)
    chain.chained_optimizers = [stub, one]
    load_weights(chunks, BUILDS["bf16"])
    reload(chain)
    assert masters_are_the_weights(chunks, optimizer)
    reload(None)


def test_a_chain_in_a_chain(shim: Any) -> None:
    """Megatron's layer-wise form nests chains too, with Muon's optimizers beside Adam's."""
    from megatron.core.optimizer import ChainedOptimizer

    shim()
    both = [trained(BUILDS["bf16"]) for _ in range(2)]
    for chunks, _ in both:
        load_weights(chunks, BUILDS["bf16"])
    inner = [one for _, optimizer in both for one in optimizer.chained_optimizers]
    reload(ChainedOptimizer([ChainedOptimizer(inner)]))
    for chunks, optimizer in both:
        assert masters_are_the_weights(chunks, optimizer)


def test_an_optimizer_that_cannot_is_named(shim: Any) -> None:
    shim()
    _, optimizer = trained(BUILDS["bf16"])
    (one,) = optimizer.chained_optimizers
    one.ddp_config.use_megatron_fsdp = True
    with pytest.warns(precision_shim.PrecisionShimWarning, match="former weights") as caught:
        reload(optimizer)
    assert "verl actor, megatron-core" in str(caught[0].message)
    assert not [one for one in precision_shim.status().decisions if "masters" in one.chosen]


def test_an_optimizer_without_masters(shim: Any) -> None:
    shim()
    _, optimizer = trained(builds.HONEST["fp32, not distributed"])
    reload(optimizer)
    assert not precision_shim.status().decisions


def masters_are_the_weights(chunks: list[Any], optimizer: Any) -> bool:
    """Whether each master equals its parameter's value, to the last bit."""
    found = 0
    for one in optimizer.chained_optimizers:
        for model, stepped, masters in triples(one):
            for master in masters:
                found += 1
                whole = join_master(stepped.detach(), master) if is_int16(master) else master
                if not torch.equal(whole.float().view(-1), model.detach().float().view(-1)):
                    return False
    assert found
    return True


def is_int16(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.int16


def triples(optimizer: Any) -> Iterator[tuple[Any, Any, list[torch.Tensor]]]:
    from precision_shim_adapters.megatron.audit.reader import _pairs

    inner = optimizer.optimizer
    for model, stepped in _pairs(optimizer, inner):
        masters = [stepped] if stepped.dtype != model.dtype else []
        beneath = getattr(inner, "param_to_inner_param", {}).get(stepped, stepped)
        if beneath is not stepped:
            masters.append(beneath)
        elif "master_param" in inner.state.get(stepped, {}):
            master = inner.state[stepped]["master_param"]
            if master.dtype is torch.float16:
                master = inner.get_unscaled_state(stepped, "master_param")
            masters.append(master)
        yield model, stepped, masters
