"""Training with ``compile.enable`` and the shim's attention seam."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import cpu

pytestmark = pytest.mark.slow


def train(policy: Any, **changes: Any) -> tuple[Any, dict[str, Any]]:
    trainer = policy(**changes)
    _, output = cpu.policy_step(trainer, 0, parts=1)
    return output.metrics, cpu.values(trainer)


@pytest.fixture(scope="module")
def operator(torchtitan: None) -> Any:
    """The attention stand-in as an operator, because a graph cannot read document bounds."""
    kernel = torch.library.custom_op("precision_shim_tests::varlen", mutates_args=())(_varlen)
    kernel.register_fake(lambda q, k, v, bounds: torch.empty_like(q))
    kernel.register_autograd(_backward, setup_context=_context)
    return kernel


@pytest.fixture
def kernel(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace ``varlen_attn`` by the operator."""
    from torchtitan.models.common import attention

    monkeypatch.setattr(
        attention, "varlen_attn", lambda q, k, v, bounds, *args, **kwargs: operator(q, k, v, bounds)
    )


COMPILED = {"enable": True, "backend": "eager", "components": ["model"]}


def test_blocks_compile_whole(kernel: None, policy: Any, shim: Any) -> None:
    """Dynamo compiles with ``fullgraph=True``; results stay equal, attention stays in float16."""
    shim()
    plain = train(policy)
    cpu.SEEN.clear()
    compiled = train(policy, compile=COMPILED)
    assert {torch.float16} == cpu.SEEN
    for name, one in plain[1].items():
        assert torch.equal(one, compiled[1][name]), name
    assert plain[0] == compiled[0]


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor
) -> torch.Tensor:
    options: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True}
    return cpu.varlen_by_sdpa(q, k, v, bounds, bounds, 0, 0, **options)


def _context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    *inputs, bounds = ctx.saved_tensors
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in inputs]
        found = torch.autograd.grad(_varlen(*leaves, bounds), leaves, gradient)
    return (*found, None)
