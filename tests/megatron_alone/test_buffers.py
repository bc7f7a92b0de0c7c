"""Buffers that a module declares in fp32, in a model that Megatron makes 16-bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from precision_shim_tools.testing import tiny_gpt

On = Callable[..., Any]
LOW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
ROUTER: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
    "moe_router_bias_update_rate": 1e-3,
}


def built(dtype: torch.dtype, **config: Any) -> Any:
    """A mixture of experts, as every framework wraps it."""
    from megatron.core.transformer.module import Float16Module

    provider = tiny_gpt(dtype, **(ROUTER | config))
    model = provider()
    return model if dtype is torch.float32 else Float16Module(model.config, model)


def routers(model: Any) -> list[Any]:
    return [one for one in model.modules() if hasattr(one, "local_tokens_per_expert")]


def biases_after_a_step(model: Any) -> list[list[float]]:
    """The biases after 80 micro-batches of 512 tokens; by a token some counts miss the mean."""
    from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias

    chosen = torch.zeros(512, 4, dtype=torch.bool)
    chosen[:256, :2], chosen[256:, 2:] = True, True
    for number in range(80):
        for router in routers(model):
            one_more = chosen.clone()
            if number == 0:
                one_more[0] = torch.tensor([True, False, True, False])
            router._apply_expert_bias(one_more)
    config = routers(model)[0].config
    _update_router_expert_bias([model], config)
    return [router.expert_bias.tolist() for router in routers(model)]


@LOW
def test_biases_move_as_in_fp32(on: On, one_process: Any, dtype: torch.dtype) -> None:
    right = biases_after_a_step(built(torch.float32))
    assert biases_after_a_step(built(dtype)) != right
    on()
    assert biases_after_a_step(built(dtype)) == right


@LOW
def test_each_buffer_of_a_router_keeps_its_dtype(
    on: On, one_process: Any, dtype: torch.dtype
) -> None:
    """Also without the feature that sets the optimizer's dtypes, and after a move."""
    on(features="fp16-scaling")
    kinds = [{"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.01}]
    if hasattr(routers(built(torch.float32))[0], "qb_beta"):  # megatron-core 0.19
        kinds.append({"moe_router_load_balancing_type": "quantile_balancing"})
    for kind in kinds:
        model = built(dtype, **kind)
        right = {name: one.dtype for name, one in built(torch.float32, **kind).named_buffers()}
        assert torch.float32 in right.values()
        assert len(right) > 2
        for moved in (model.module, model.module.to("cpu")):
            assert {name: one.dtype for name, one in moved.named_buffers()} == right
        assert all(one.dtype is dtype for name, one in model.named_parameters() if "router" in name)


class Scaled(torch.nn.Module):
    """Gemma 4's layers in Megatron-Bridge compute with such a scalar, in the model's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("scalar", torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))
        table = torch.ones(4).float()
        self.register_buffer("table", table)
        for name in ("first", "second"):
            self.register_buffer(name, torch.zeros(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen += values.shape[0]
        return self.linear(values * self.scalar) * self.table[0].to(values.dtype)


@LOW
def test_a_buffer_without_a_declared_dtype_follows_the_model(
    on: On, one_process: Any, dtype: torch.dtype
) -> None:
    """An fp32 scalar would make the hidden states fp32, which no 16-bit layer takes."""
    from megatron.core.transformer.module import Float16Module

    config = tiny_gpt(dtype).config  # type: ignore[attr-defined]
    on()
    model = Float16Module(config, Scaled()).module
    assert model(torch.ones(300, 4, dtype=dtype)).dtype is dtype
    assert {name: one.dtype for name, one in model.named_buffers()} == {
        "scalar": dtype,
        "seen": torch.float32,
        "table": torch.float32,
        "first": torch.float64,
        "second": torch.float64,
        "count": torch.long,
    }
    assert float(model.seen) == 300


@LOW
@pytest.mark.parametrize("saved_with", [True, False])
def test_a_checkpoint_loads_with_and_without_the_shim(
    on: On, shim: Any, one_process: Any, dtype: torch.dtype, saved_with: bool
) -> None:
    """Megatron itself saves and loads ``expert_bias`` in fp32; the counters are not saved."""
    import precision_shim

    models = []
    for patched in (saved_with, not saved_with):
        precision_shim.uninstall()
        if patched:
            on()
        models.append(built(dtype))
    before, after = models
    for router in routers(before):
        router.expert_bias.data = torch.tensor([0.001, -0.001, 0.1, 0.3])
    saved = before.state_dict()
    after.load_state_dict(saved)
    kept = [name for name in saved if "router" in name and name.endswith("bias")]
    assert len(kept) == len(routers(after))
    assert not any("tokens" in name for name in saved)
    assert all(saved[name].dtype is torch.float32 for name in kept)
    for old, new in zip(routers(before), routers(after), strict=True):
        assert torch.equal(old.expert_bias, new.expert_bias)
