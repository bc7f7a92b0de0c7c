"""Direct calls of verl's functions, outside any engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version

import precision_shim
from precision_shim.errors import DtypeError, InconsistentPrecisionError, PrecisionShimWarning

from .conftest import VERL

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FOLLOW = {"optimizer_states": "follow-model"}


def config(**overrides: Any) -> Any:
    from omegaconf import OmegaConf

    fields = {"optimizer": "adam", "lr": 1e-3, "min_lr": 0.0, "clip_grad": 1.0, "weight_decay": 0.0}
    return OmegaConf.create(
        {**fields, "override_optimizer_config": {"adam_beta2": 0.95} | overrides}
    )


def model(dtype: torch.dtype, prepare: Any = None, **options: Any) -> Any:
    from verl.utils.megatron_utils import get_model

    from precision_shim_tools.testing.megatron_cpu import tiny_gpt

    provider = tiny_gpt(dtype)

    def prepared(**kwargs: Any) -> Any:
        made = provider(**kwargs)
        if prepare is not None:
            prepare(made)
        return made

    return get_model(prepared, transformer_config=provider.config, **options)


def bucket(chunks: Any) -> set[torch.dtype]:
    return {buffer.grad_data.dtype for chunk in chunks for buffer in chunk.buffers}


def flags(dtype: torch.dtype) -> dict[str, bool]:
    return {"fp16": dtype is FP16, "bf16": dtype is BF16}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_the_table(fused_adam: str, shim: Any, dtype: torch.dtype) -> None:
    shim(settings=FOLLOW)

    from verl.utils.megatron.optimizer import get_megatron_optimizer, init_megatron_optim_config

    chunks = model(dtype)
    made = init_megatron_optim_config(config(), **flags(dtype))
    get_megatron_optimizer(chunks, made)
    low = BF16 if dtype is BF16 else FP32
    assert bucket(chunks) == {low}
    assert (made.main_grads_dtype, made.exp_avg_dtype, made.exp_avg_sq_dtype) == (low, low, low)
    assert made.params_dtype is dtype
    assert (made.bf16, made.fp16) == (dtype is BF16, dtype is FP16)
    assert made.use_precision_aware_optimizer is (dtype is not FP32)


@pytest.mark.parametrize(
    "strict",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                Version("0.7") > VERL,
                reason="strict refuses a version with a path that is not there",
            ),
        ),
    ],
)
def test_a_pair_that_disagrees(fused_adam: str, shim: Any, strict: bool) -> None:
    shim(settings=FOLLOW, strict=strict)

    from verl.utils.megatron.optimizer import get_megatron_optimizer, init_megatron_optim_config

    chunks = model(FP32)
    made = init_megatron_optim_config(config())  # bf16 is the default, the model is fp32
    expected = pytest.raises if strict else pytest.warns
    kind = InconsistentPrecisionError if strict else PrecisionShimWarning
    with expected(kind, match="fp32.*main grads|main grads.*fp32") as caught:
        optimizer = get_megatron_optimizer(chunks, made)
    if not strict:  # the audit finds the same fault, but does not warn again
        ours = [one for one in caught if one.category is PrecisionShimWarning]
        assert len(ours) == 1, [str(one.message) for one in ours]
        if Version("0.7") <= VERL:
            assert not precision_shim.status().audit[-1].ok
        del optimizer  # status() would have forgotten the audit


def test_the_models_dtype_counts_and_not_verls_flags(fused_adam: str, shim: Any) -> None:
    """verl's branch for fp16 also sets fields that are wrong for a bf16 model."""
    shim(settings=FOLLOW)

    from verl.utils.megatron.optimizer import init_megatron_optim_config

    from precision_shim_adapters.megatron import building
    from precision_shim_adapters.verl.config import read_requested

    with building("verl", lambda: read_requested(config(), declared=FP16)):
        model(BF16)
        made, right = (init_megatron_optim_config(config(), **flags(one)) for one in (FP16, BF16))
    assert made == right


def test_frozen_parameters_do_not_count(fused_adam: str, shim: Any) -> None:
    """Of LoRA's parameters, only the trained ones determine the bucket's dtype."""
    shim(settings=FOLLOW)

    def prepare(made: Any) -> None:
        for name, parameter in made.named_parameters():
            parameter.requires_grad = "layernorm" in name
        embedding = made.embedding.word_embeddings
        embedding.weight.data = embedding.weight.data.float()

    assert bucket(model(BF16, prepare)) == {BF16}


def test_megatron_used_directly_gets_coercion_and_nothing_else(fused_adam: str, shim: Any) -> None:
    from megatron.core.optimizer import OptimizerConfig

    shim(settings=FOLLOW)
    made = OptimizerConfig(
        bf16=True,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=True,
        exp_avg_sq_dtype="bf16",  # type: ignore[arg-type]
    )
    assert made.exp_avg_sq_dtype is BF16
    assert made.exp_avg_dtype is FP32
    with pytest.raises(DtypeError, match="exp_avg_dtype: bf16 without use_precision_aware"):
        OptimizerConfig(exp_avg_dtype="bf16")  # type: ignore[arg-type]


def test_chunks_of_a_model_share_one_bucket_dtype(fused_adam: str, shim: Any) -> None:
    """Megatron asserts equal dtypes; with LoRA a virtual-pipeline chunk may train no weight."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    from precision_shim_tools.testing.megatron_cpu import tiny_gpt

    shim(settings=FOLLOW)

    from precision_shim_adapters.megatron import building
    from precision_shim_adapters.verl.config import read_requested

    provider = tiny_gpt(BF16)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True
    )
    made = []
    with building("verl", lambda: read_requested(config(), subject="actor", declared=BF16)):
        for trains in (True, False, True):
            module = Float16Module(provider.config, provider())
            module.requires_grad_(trains)
            made.append(DistributedDataParallel(provider.config, ddp_config, module))
    assert bucket(made[:1]) == {BF16}
    assert made[0].ddp_config == made[1].ddp_config == made[2].ddp_config
    assert ddp_config.grad_reduce_in_fp32, "the caller's config"
