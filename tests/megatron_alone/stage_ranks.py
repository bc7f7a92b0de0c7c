"""The ranks of ``test_stages.py``: the stages of a pipeline."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

import precision_shim
from precision_shim_adapters.megatron import RequestedConfig, building
from precision_shim_tools.testing import (
    megatron_on_cpu,
    model_parallel,
    stand_in_transformer_engine,
)

from ..processes.rank_server import Launch, look_ahead


def prepare() -> None:
    """Import megatron-core, in the server."""
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401

    look_ahead("megatron")


def run(launch: Launch) -> Any:
    """Run a rank from its start to its end."""
    torch.set_num_threads(1)
    with (
        stand_in_transformer_engine(),
        megatron_on_cpu(),
        model_parallel(
            2, launch.rank, launch.store, pipeline_model_parallel_size=launch.options["stages"]
        ),
    ):
        precision_shim.install(
            frameworks="megatron", features="fp16-scaling", strict=True, export=False
        )
        try:
            return fsdp(launch)
        finally:
            precision_shim.uninstall()


def fsdp(launch: Launch) -> bool:
    """Build Megatron-FSDP's stage of a model whose last stage trains only fp32 parameters.

    Returns ``check_for_nan_in_grad``. A CPU runs the ``__init__`` of Megatron-FSDP in part only.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    config = DistributedDataParallelConfig(check_for_nan_in_grad=True)
    dtype = (torch.float16, torch.float32)[launch.rank]
    made = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    with (
        building("megatron", lambda: RequestedConfig(asked={"fp16": True})),
        contextlib.suppress(Exception),
    ):
        made.__init__(object(), config, torch.nn.Linear(2, 2, dtype=dtype))  # type: ignore[misc]
    return bool(vars(made)["ddp_config"].check_for_nan_in_grad)
