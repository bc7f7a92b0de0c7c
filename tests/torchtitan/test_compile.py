"""``compile.enable`` with the attention seam in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import cpu


def train(policy: Any, **changes: Any) -> tuple[Any, dict[str, Any]]:
    trainer = policy(**changes)
    _, output = cpu.policy_step(trainer, 0, parts=1)
    return output.metrics, cpu.values(trainer)


@pytest.mark.slow
def test_blocks_compile_whole(policy: Any, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled by dynamo with ``fullgraph=True``; the same numbers, and attention in float16."""
    from torchtitan.models.common import attention

    # The stand-in for the kernel reads its bounds, which no graph can hold.
    kernel = torch.library.custom_op("precision_shim_tests::varlen", mutates_args=())(_varlen)
    kernel.register_fake(lambda q, k, v, bounds: torch.empty_like(q))
    kernel.register_autograd(_backward, setup_context=_context)
    monkeypatch.setattr(
        attention, "varlen_attn", lambda q, k, v, bounds, *args, **kwargs: kernel(q, k, v, bounds)
    )
    shim()
    plain = train(policy)
    cpu.SEEN.clear()
    compiled = train(policy, compile={"enable": True, "backend": "eager", "components": ["model"]})
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


def test_alone_a_wrapper_of_wrapts_breaks_the_compiler(torchtitan: None) -> None:
    """Why a plain function stands there."""
    import wrapt

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    wrapped = wrapt.FunctionWrapper(forward, lambda own, instance, args, kwargs: own(*args))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(wrapped, backend="eager", fullgraph=True)(torch.ones(2))
