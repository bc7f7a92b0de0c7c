"""SkyRL's JAX backend: the shim refuses a float16 checkpoint by name.

The backend's class and the model's config are SkyRL's own. An empty package
replaces JAX, which no environment has, so SkyRL's method fails after the refusal.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import Any

import pytest

import precision_shim
from precision_shim.errors import PrecisionShimWarning, UnsupportedPrecisionError

from ..empty_packages import empty_packages


def start(dtype: str) -> list[str]:
    """The shim's warnings when a JAX backend builds a step for a checkpoint of the given dtype."""
    from transformers import Qwen3Config as Checkpoint

    with empty_packages("jax", "flax", "optax", "cloudpathlib"):
        backend = importlib.import_module("skyrl.backends.jax").JaxBackendImpl
        kind = importlib.import_module("skyrl.tx.models.configs").Qwen3Config
        one = object.__new__(backend)
        one.model_config = kind(
            Checkpoint(dtype=dtype),
            max_lora_adapters=1,
            max_lora_rank=1,
            shard_attention_heads=False,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.suppress(AttributeError, TypeError):
                one._create_loss_and_grad_fn()
    return [str(one.message) for one in caught if one.category is PrecisionShimWarning]


def test_a_float16_checkpoint_is_refused_by_name(shim: Any) -> None:
    shim(features=["fp16-scaling"])
    (said,) = start("float16")
    assert "config.json has dtype=torch.float16: its JAX backend has no loss scaler" in said
    assert [one.chosen for one in precision_shim.status().decisions] == ["left as it is"]
    assert start("bfloat16") == []
    shim(features=["fp16-scaling"], strict=True)
    with pytest.raises(UnsupportedPrecisionError, match="JAX backend has no loss scaler"):
        start("float16")
