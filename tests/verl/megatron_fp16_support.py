"""Shared by the fp16 tests on Megatron: verl's own training worker with its real engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from .conftest import VERL
from .support import batch, engine, optim_config, training_config, value_loss

BRIDGE_FOR_CRITIC = Version("0.9.0") == VERL
"""In verl 0.9.0 building a critic through mbridge raises verl's own TypeError."""

CRITIC_RUNS = Version("0.8") <= VERL
"""In 0.7's engine a critic raises verl's own TypeError before the first loss."""


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
        module, _, name = kind.partition(":")
        worker = getattr(__import__(module, fromlist=[name]), name)
        self.worker = worker(training_config(self.engine, critic=critic))
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
