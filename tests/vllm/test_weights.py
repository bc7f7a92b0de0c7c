"""The weights of a running engine: rounded once, or rounded to bf16 on the way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from .engines import as_engine_names, share_on_bf16s_grid

HALF, BF16 = torch.float16, torch.bfloat16
WAYS = ("load_weights", "reload_weights")
"""In-place loading, as frameworks do on a GPU, and vLLM's own function for packed layers."""


@pytest.fixture(scope="module")
def running(both_sides: ModuleType, size: Any, checkpoint: Path) -> Iterator[Any]:
    """An fp16 engine whose linear layers keep their weights.

    On a CPU vLLM packs each layer's weight for a CPU kernel, and empties the parameter. If both CPU
    kernels are missing, vLLM calls torch's kernel on the parameter, as on a GPU.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_custom_ops, "_supports_onednn", False)
        patch.setattr(utils, "check_cpu_sgl_kernel", lambda *args, **kwargs: False)
        with both_sides.engine(checkpoint, "float16", size.prompt + size.new) as llm:
            yield llm


@pytest.fixture(scope="module")
def trained(model: Any) -> Any:
    """The model after an update of each weight."""
    changed, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in changed.parameters():
            one.add_(0.01 * torch.randn(one.shape, generator=generator))
    return changed


def send(llm: Any, way: str, model: Any, wire: torch.dtype) -> None:
    """Load the trainer's weights into the engine, in the dtype ``wire``."""
    weights = [(name, one.detach().to(wire)) for name, one in model.named_parameters()]
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    if way == "load_weights":
        runner.model.load_weights(weights)
    else:
        runner.reload_weights(weights_iterator=iter(weights))


def held(llm: Any) -> dict[str, torch.Tensor]:
    """Copies of the engine's parameters, by vLLM's public function."""
    (parameters,) = llm.apply_model(lambda own: {n: p.data for n, p in own.named_parameters()})
    return dict(parameters)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wire", [torch.float32, HALF])
def test_the_engine_holds_the_trainers_weights_rounded_once(
    running: Any, trained: Any, model: Any, way: str, wire: torch.dtype
) -> None:
    send(running, way, model, torch.float32)
    before = {name: one.clone() for name, one in held(running).items()}
    send(running, way, trained, wire)
    after = held(running)
    wanted = as_engine_names({n: p.detach().to(HALF) for n, p in trained.named_parameters()})
    assert after.keys() == wanted.keys()
    for name, one in after.items():
        assert one.dtype == HALF
        assert torch.equal(one, wanted[name]), name
        assert not torch.equal(one, before[name]), name


@pytest.mark.parametrize("way", WAYS)
def test_a_bf16_wire_shows_in_the_values_and_in_no_dtype(
    running: Any, trained: Any, way: str
) -> None:
    shares = {}
    for wire in (HALF, BF16):
        send(running, way, trained, wire)
        assert {one.dtype for one in held(running).values()} == {HALF}
        shares[wire] = share_on_bf16s_grid(held(running))
    assert shares[BF16] == 1.0
    assert shares[HALF] < 0.5


def test_a_bf16_wire_brings_the_mismatch_back(
    both_sides: ModuleType, size: Any, running: Any, trained: Any
) -> None:
    k3, prompts = {}, both_sides.random_prompts(size, seed=1)
    for wire in (HALF, BF16):
        send(running, "load_weights", trained, wire)
        sampled = both_sides.sample(running, prompts, size.new)
        k3[wire] = both_sides.mismatch(
            both_sides.score(trained, sampled, HALF), sampled.logprobs
        ).k3
    assert k3[BF16] > 4 * k3[HALF]
