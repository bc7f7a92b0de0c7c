"""Shared by the fp16 tests on Megatron: verl's own training worker with its real engine."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from .conftest import VERL
from .support import batch, engine, optim_config

BRIDGE_FOR_CRITIC = Version("0.9.0") == VERL
"""In verl 0.9.0 building a critic through mbridge raises verl's own TypeError."""

CRITIC_RUNS = Version("0.8") <= VERL
"""In 0.7's engine a critic raises verl's own TypeError before the first loss."""


def value_loss(
    model_output: Any, data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Squared error of the values; verl's own loss needs the trainer's padded fields."""
    values = model_output["values"]
    values = values.values() if values.is_nested else values
    error = values.float().flatten() - data["returns"].values().float().flatten()
    return error.square().mean(), {}


class Training:
    """verl's real ``TrainingWorker`` with its real, initialized engine."""

    def __init__(
        self,
        checkpoint: Path,
        patch: pytest.MonkeyPatch,
        *,
        dtype: str = "float16",
        critic: bool = False,
        kind: str = "verl.workers.engine_workers:TrainingWorker",
        overrides: dict[str, Any] | None = None,
        overrides_of_model: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from verl.workers.config import TrainingWorkerConfig
        from verl.workers.engine import base
        from verl.workers.utils.losses import sft_loss

        options.setdefault("bridge", critic and BRIDGE_FOR_CRITIC)
        options.setdefault("optim", optim_config(override_optimizer_config=overrides or {}))
        self.engine = engine(
            checkpoint, dtype, critic=critic, overrides=overrides_of_model, **options
        )
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            patch.setenv(name, value)
        for name in ("max_memory_allocated", "max_memory_reserved"):
            patch.setattr(torch.cpu, name, lambda: 0, raising=False)  # torch.cpu lacks these
        patch.setattr(base.EngineRegistry, "new", classmethod(lambda *args, **kwargs: self.engine))
        fields = {
            "model_type": "value_model" if critic else "language_model",
            "model_config": self.engine.model_config,
            "engine_config": self.engine.engine_config,
            "optimizer_config": self.engine.optimizer_config,
            "checkpoint_config": self.engine.checkpoint_config,
        }
        known = inspect.signature(TrainingWorkerConfig).parameters
        module, _, name = kind.partition(":")
        worker = getattr(__import__(module, fromlist=[name]), name)
        self.worker = worker(
            TrainingWorkerConfig(**{key: value for key, value in fields.items() if key in known})
        )
        self.worker.flops_counter.estimate_flops = lambda *args, **kwargs: (0.0, 1.0)
        self.worker.reset()
        self.worker.set_loss_fn(value_loss if critic else partial(sft_loss, None))

    @property
    def scaler(self) -> Any:
        return self.engine.optimizer.chained_optimizers[0].grad_scaler

    @property
    def scale(self) -> float:
        return float(self.engine.optimizer.get_loss_scale())

    def parameters(self) -> torch.Tensor:
        """All parameters in one flat fp32 tensor."""
        return torch.cat([p.detach().float().flatten() for p in self.engine.module[0].parameters()])

    def data(self, **options: Any) -> Any:
        import verl.utils.tensordict_utils as tu

        made = batch(**options)
        tu.assign_non_tensor(made, global_token_num=None, update_lr_scheduler=True)
        return made

    def train(self, **data: Any) -> dict[str, Any]:
        """Call ``train_batch`` once; returns the trainer's metrics."""
        import verl.utils.tensordict_utils as tu

        return dict(tu.get(self.worker.train_batch(self.data(**data)), "metrics"))

    def evaluate(self, **data: Any) -> dict[str, Any]:
        """Call ``infer_batch`` once; returns its metrics."""
        import verl.utils.tensordict_utils as tu

        return dict(tu.get(self.worker.infer_batch(self.data(**data)), "metrics"))
