"""ROLL's own worker of a DPO job, in the Ray actor that ROLL's cluster starts, on a CPU.

ROLL's worker, strategies, models and data are real. The config names this worker as its
``worker_cls``. Ray counts a GPU that does not exist: for Ray ROLL's platform is the one with GPUs,
and for torch it is the CPU. Driver and actors import this module; it leaves installing the shim to
the start-up file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.pipeline.dpo.actor_worker import ActorWorker
from roll.platforms import current_platform
from roll.platforms.cuda import CudaPlatform

HUGE = 1e30
"""The factor of the loss in the steps that overflow."""

OVERFLOWS = (1, 2)
"""Megatron halves its scale after the second overflow."""


class OnCpu(CudaPlatform):
    """ROLL's platform with GPUs, whose functions of torch.cuda are those of torch.cpu."""

    device_type = "cpu"
    communication_backend = "gloo"
    random = SimpleNamespace(get_rng_state_all=lambda: [torch.get_rng_state()])
    get_rng_state = staticmethod(torch.get_rng_state)
    device_count = staticmethod(lambda: 1)
    clear_cublas_workspaces = staticmethod(lambda: None)
    apply_ulysses_patch = staticmethod(lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, lambda *given: 0)  # such as reset_peak_memory_stats


# Other modules of ROLL have imported this object already.
current_platform.__class__ = OnCpu


class Worker(ActorWorker):
    """A worker whose loss overflows in two steps, and that tells what it has seen."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> Any:
        self.digests: list[str] = []
        self.error: Exception | None = None
        if self.worker_config.strategy_args.strategy_name.startswith("megatron"):
            _megatron_on_cpu()
        try:
            return super().initialize(pipeline_config)
        except Exception as error:
            self.error = error
            raise

    def started(self) -> None:
        """Raise what ended the start, which ROLL's pipeline does not wait for."""
        if self.error is not None:
            raise self.error

    def loss_func(self, data: Any, output_tensor: torch.Tensor) -> Any:
        self.digests.append(_digest(self._models()))
        loss, metrics = super().loss_func(data, output_tensor)
        return loss * (HUGE if data.meta_info["global_step"] in OVERFLOWS else 1.0), metrics

    def report(self) -> dict[str, Any]:
        """The worker's process and parameters; a digest of the parameters before each step."""
        shim = sys.modules.get("precision_shim")
        framework = shim.status().frameworks.get("roll") if shim is not None else None
        parameters = [one for model in self._models() for one in model.parameters()]
        return {
            "pid": os.getpid(),
            "shim": sorted(name for name in sys.modules if name.startswith("precision_shim")),
            "wrapped": sorted(
                seam.target
                for seam in (framework.seams if framework else ())
                if seam.state == "wrapped"
            ),
            "dtypes": sorted({str(one.dtype) for one in parameters}),
            "finite": all(bool(one.isfinite().all()) for one in parameters),
            "digests": self.digests,
        }

    def _models(self) -> list[Any]:
        model = self.strategy.model
        return list(model.get_models()) if hasattr(model, "get_models") else [model]


def _digest(models: list[Any]) -> str:
    digest = hashlib.sha256()
    for one in (one for model in models for one in model.parameters()):
        local = one.to_local() if hasattr(one, "to_local") else one
        # A copy, because FSDP2 resizes the storage of gathered parameters.
        digest.update(local.detach().clone().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_open = contextlib.ExitStack()
"""Contexts that stay open until the worker ends."""


def _megatron_on_cpu() -> None:
    from precision_shim_tools.testing import megatron_on_cpu, stand_in_transformer_engine

    strategies = importlib.import_module("roll.distributed.strategy.megatron_strategy")
    # It would replace a function of torch 2.9 that returns something else in torch 2.13.
    strategies.patch_torch_validate_global_plan = lambda: None
    _open.enter_context(stand_in_transformer_engine())
    _open.enter_context(megatron_on_cpu())
    OnCpu.current_device = staticmethod(lambda: 0)  # type: ignore[attr-defined]
    models = importlib.import_module("mcore_adapter.models.model_factory").PretrainedModel
    own = models.get_batch_on_this_cp_rank

    # Without TransformerEngine's attention, Megatron makes its causal mask itself.
    def without_mask(self: Any, batch: dict[str, Any], **given: Any) -> Any:
        return own(self, {**batch, "attention_mask": None}, **given)

    models.get_batch_on_this_cp_rank = without_mask
