"""The audit of SkyRL's Megatron worker: alone, with the other features, and under strict."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import precision_shim
from precision_shim.errors import InconsistentPrecisionError, PrecisionShimWarning

from .support import build

MEGATRON = "trainer.policy.megatron_config"
BUCKET = f"{MEGATRON}.ddp_config.grad_reduce_in_fp32=false"
FLAGS = (
    f"{MEGATRON}.optimizer_config_kwargs.bf16=false",
    f"{MEGATRON}.optimizer_config_kwargs.params_dtype=fp32",
)


@pytest.mark.parametrize("features", [["audit"], None], ids=["alone", "all"])
@pytest.mark.parametrize("strict", [False, True], ids=["warns", "strict"])
def test_a_bucket_that_the_user_wrote(
    fused_adam: str, checkpoints: dict[str, Path], shim: Any, features: Any, strict: bool
) -> None:
    shim(features=features, strict=strict, settings={"optimizer_states": "as-configured"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(checkpoints["bfloat16"], BUCKET)
    (audit,) = precision_shim.status().audit
    assert (audit.framework, audit.subject) == ("skyrl", "policy")
    assert [one.code for one in audit.problems] == ["main-grads-dtype"]
    ours = [str(one.message) for one in caught if one.category is PrecisionShimWarning]
    assert len([one for one in ours if "main" in one]) == 1, ours


def test_flags_that_the_user_wrote(
    fused_adam: str, checkpoints: dict[str, Path], shim: Any
) -> None:
    shim(features=["audit", "dtype-coercion"], strict=True)
    with pytest.warns(PrecisionShimWarning, match="params-dtype"):
        build(checkpoints["bfloat16"], *FLAGS)
    (audit,) = precision_shim.status().audit
    assert "params-dtype" in [one.code for one in audit.problems]


def test_what_skyrl_wrote_itself_raises_under_strict(
    fused_adam: str, checkpoints: dict[str, Path], shim: Any
) -> None:
    """SkyRL's OptimizerConfig says bf16 for every model, so an fp16 loss is not scaled."""
    shim(features=["audit"], strict=True)
    with pytest.raises(InconsistentPrecisionError, match="fp16"):
        build(checkpoints["float16"], "trainer.bf16=false")
