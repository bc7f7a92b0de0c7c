"""Megatron-FSDP's buckets, whose dtype another field of the DDP's config sets from 0.19 on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.process import registry, settings
from precision_shim.seams import check
from precision_shim.seams._source import installed, looking_at
from precision_shim_adapters.megatron import RequestedConfig, building
from precision_shim_adapters.megatron.installed import FSDP_GRADS, fsdp_heeds_bucket
from precision_shim_tools.plan.megatron.model import MegatronModel, decide
from precision_shim_tools.testing import tiny_gpt

On = Callable[..., Any]
BF16, FP32 = torch.bfloat16, torch.float32


def bucket(*, written: bool | None = None, present: bool = True, **ddp: Any) -> set[torch.dtype]:
    """The dtypes of the buckets that the real Megatron-FSDP makes for a bf16 model on a CPU."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.transformer.module import Float16Module

    provider = tiny_gpt(BF16)
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
        grad_reduce_in_fp32=present,
        **ddp,
    )
    model = Float16Module(provider.config, provider())  # type: ignore[attr-defined]
    requested = RequestedConfig(bucket_in_fp32=written, blockers=("Megatron-FSDP",))
    with building("megatron", lambda: requested):
        made: Any = FullyShardedDataParallel(
            model.config, config, model, device=torch.device("cpu")
        )
    assert config.grad_reduce_in_fp32 is present  # the caller's object is unchanged
    groups = made.param_and_grad_buffer.parameter_groups
    return {group.main_grad_buffer.dtype for group in groups if group.main_grad_buffer}


def planned(*, written: bool | None, present: bool, own: str, shim: bool) -> set[torch.dtype]:
    from precision_shim_adapters.megatron.policy.requested import InForce

    requested = RequestedConfig(bucket_in_fp32=written, blockers=("Megatron-FSDP",), declared=BF16)

    class Sizes:
        parameters = 1

    asked = MegatronModel(
        requested,
        Sizes,
        None,
        BF16,
        bucket_in_fp32=present,
        fsdp=own,  # type: ignore[arg-type]
    )
    side = decide(asked, InForce("auto", dispatches=shim, aligns=shim))
    return {FP32 if side.bucket.grad_reduce_in_fp32 else BF16}


@pytest.mark.parametrize(
    ("written", "present", "own", "expected"),
    [
        (None, True, "", FP32),
        (None, False, "", FP32),
        (True, True, "", FP32),
        (False, False, "", BF16),
        (None, False, "bf16", BF16),
    ],
    ids=str,
)
def test_the_bucket_is_as_promised(
    on: On, one_process: Any, written: bool | None, present: bool, own: str, expected: torch.dtype
) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    if own and not hasattr(DistributedDataParallelConfig, FSDP_GRADS):
        own, expected = "", FP32  # megatron-core 0.16 has no such field
    ddp = {FSDP_GRADS: BF16} if own else {}
    asked = {"written": written, "present": present}
    without = {FP32} if present and fsdp_heeds_bucket() else {BF16}
    assert bucket(**asked, **ddp) == planned(**asked, own=own, shim=False) == without
    on(features="grad-bucket-alignment,bf16-dispatch")
    differs = pytest.warns(precision_shim.PrecisionShimWarning, match="another dtype")
    with differs if written is False else contextlib.nullcontext():
        assert bucket(**asked, **ddp) == planned(**asked, own=own, shim=True) == {expected}
    assert any("gradient bucket" in one.chosen for one in precision_shim.status().decisions)


@pytest.mark.parametrize("name", ["FullyShardedDataParallelV1", "Renamed"])
def test_megatron_fsdp_alone_is_refused_where_its_classes_changed(name: str) -> None:
    """Megatron's main has a function of the old name, which picks one of two classes."""
    module, head = "megatron.core.distributed.fsdp.mcore_fsdp_adapter", "    def __init__(self, "
    text = f"def FullyShardedDataParallel(config):\n    pass\n\n\nclass {name}:\n"
    text += f"{head}config, ddp_config, module, pg_collection=None):\n        pass\n"

    def source(asked: str) -> Any:
        return (lambda: text) if asked == module else installed(asked)

    chosen = settings.resolve(frameworks=("megatron",), known_frameworks=registry.entries())
    with looking_at(source):
        adapter = registry.load(registry.entries()["megatron"])
        seams = check(adapter, chosen.features, chosen).predicted()
    refused = {one.group for one in seams if one.state == "refused"}
    assert refused == (set() if name.endswith("V1") else {"megatron-fsdp"})
    assert {one.feature for one in seams if one.group == "megatron-fsdp"} == {
        "dtype-coercion",
        "grad-bucket-alignment",
        "fp16-scaling",
    }
