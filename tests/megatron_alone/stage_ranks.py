"""The ranks of ``test_stages.py``: the stages of a pipeline, and the parts of tensors."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch

import precision_shim
from precision_shim.errors import PartialInstallationError
from precision_shim.process import marks
from precision_shim_adapters.megatron import RequestedConfig, building, metrics
from precision_shim_tools.testing import (
    megatron_on_cpu,
    model_parallel,
    stand_in_transformer_engine,
)

from ..every_framework.shim_warnings import ours
from ..processes.rank_server import Launch, look_ahead
from .training import Trainer, fp16


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
        model_parallel(2, launch.rank, launch.store, **launch.options["parallel"]),
    ):
        marks.PATIENCE = 1.0
        if launch.options.get("only") in (None, launch.rank):
            precision_shim.install(
                frameworks="megatron", features="fp16-scaling", strict=True, export=False
            )
        try:
            cases = {"alone": alone, "fsdp": fsdp, "tensors": tensors, "unscaled": unscaled}
            return cases[launch.case](launch)
        finally:
            precision_shim.uninstall()


def alone(_: Launch) -> str:
    """Build a model and its fp16 optimizer, as a trainer without an adapter."""
    try:
        Trainer.of(fp16())
    except (PartialInstallationError, RuntimeError) as error:  # the other rank has left
        return str(error)
    return ""


def fsdp(launch: Launch) -> bool | str:
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
        try:
            made.__init__(object(), config, torch.nn.Linear(2, 2, dtype=dtype))  # type: ignore[misc]
        except PartialInstallationError as error:
            return str(error)
    return bool(vars(made)["ddp_config"].check_for_nan_in_grad)


def tensors(launch: Launch) -> dict[str, Any]:
    """Take three steps; in the second, only the last rank's part of one gradient overflows."""
    options = launch.options
    build = replace(
        fp16(hysteresis=1), distributed=options["distributed"], model=options["parallel"]
    )
    trainer = Trainer.of(build)
    report: dict[str, Any] = {"skipped": [], "moved": [], "metrics": []}
    for number in range(3):
        before = trainer.parameters()
        trainer.backward(number)
        if number == 1 and launch.rank == 1:
            part = trainer.chunks[0].module.module.decoder.layers[0].mlp.linear_fc1.weight
            assert part.tensor_model_parallel
            part.main_grad.view(-1)[0] = torch.inf
        successful, *_ = trainer.optimizer.step()
        report["skipped"].append(not successful)
        report["moved"].append(not all(map(torch.equal, before, trainer.parameters())))
        report["metrics"].append(metrics(trainer.optimizer))
    return report


def unscaled(launch: Launch) -> list[str]:
    """Warnings of a step whose loss is not scaled; each stage has a whole model of its own."""
    trainer = Trainer.of(fp16())
    trainer.backward(0, scaled=False)
    with ours() as told:
        trainer.optimizer.prepare_grads()
    return told
