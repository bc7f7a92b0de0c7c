"""Dtype names in both kinds of OptimizerConfig that versions of Bridge make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version

from precision_shim.errors import DtypeError

from ..support import NEMO_RL
from . import support

DEFERRED = Version("0.5") <= NEMO_RL
"""From 0.5 on Bridge has its own OptimizerConfig class, which checks fields in ``finalize()``."""

NAMES = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "torch.bfloat16",
    "exp_avg_sq_dtype": "FP32",
    "main_grads_dtype": "bf16",
}


def made(**fields: Any) -> Any:
    """Make an OptimizerConfig as NeMo-RL does, and finalize it as ConfigContainer.validate does."""
    from megatron.bridge.training.config import OptimizerConfig

    config = OptimizerConfig(**{**support.OPTIMIZER, **fields})
    if DEFERRED:
        config.finalize()
    return config


def test_names_become_dtypes(fused_adam: str, shim: Callable[..., Any]) -> None:
    before = made(**NAMES)
    assert before.params_dtype == "float32", "Megatron itself coerces: delete the seam"
    assert before.exp_avg_dtype == "torch.bfloat16"
    shim()
    config = made(**NAMES)
    assert config.params_dtype is torch.float32
    assert config.exp_avg_dtype is torch.bfloat16
    assert config.exp_avg_sq_dtype is torch.float32
    assert config.main_grads_dtype is torch.bfloat16


def test_a_name_for_fp32_is_fp32_without_the_precision_aware_optimizer(
    cpu: None, shim: Callable[..., Any]
) -> None:
    with pytest.raises(AssertionError, match="exp_avg_dtype can only be fp32"):
        made(exp_avg_dtype="float32")
    shim()
    assert made(exp_avg_dtype="float32").exp_avg_dtype is torch.float32


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"params_dtype": "float23"}, "float23"),
        ({**NAMES, "main_params_dtype": "bf16"}, "main_params_dtype"),
    ],
)
def test_what_no_optimizer_takes_is_refused_by_name(
    fused_adam: str, shim: Callable[..., Any], fields: dict[str, Any], told: str
) -> None:
    made(**fields)  # without the shim, Megatron accepts the fields
    shim()
    with pytest.raises(DtypeError, match=told):
        made(**fields)


def provided(**fields: Any) -> Any:
    """Set fields on one of Bridge's providers and finalize it, as each framework on Bridge does."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    provider = GPTModelProvider(num_layers=2, hidden_size=16, num_attention_heads=2)
    for name, value in fields.items():
        setattr(provider, name, value)
    # Bridge 0.2's providers validate when they are made, and again in ConfigContainer.validate.
    (getattr(provider, "finalize", None) or provider.__post_init__)()
    return provider


def test_a_providers_names_become_what_megatron_reads(cpu: None, shim: Callable[..., Any]) -> None:
    names = {"params_dtype": "BF16", "pipeline_dtype": "half", "autocast_dtype": "bf16"}
    assert provided(moe_router_dtype="Float32").moe_router_dtype == "Float32"
    shim()
    made = provided(**names, moe_router_dtype="Float32")
    assert (made.params_dtype, made.pipeline_dtype) == (torch.bfloat16, torch.float16)
    assert (made.autocast_dtype, made.moe_router_dtype) == (torch.bfloat16, "fp32")
    for name in (*names, "moe_router_dtype"):
        with pytest.raises(DtypeError, match="dtype='bf17'"):
            provided(**{name: "bf17"})
