"""Drives ROLL's strategies on a CPU: their own ``initialize``, ``train_step`` and checkpoints.

ROLL's strategies, optimizer and offload are real, and so is mcore_adapter's ``VirtualModels``. The
tests provide the model (a tiny GPT), the tokenizer, and the worker around a strategy.
``workers.py`` drives ROLL's own workers in a Ray cluster.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from precision_shim_tools.testing import tiny_gpt

from . import absent

OVERFLOW = 1e30
NAME = "actor_train"


def stand_in_for_absent() -> None:
    """Make ROLL importable until the process ends."""
    absent.stand_in()
    platform = importlib.import_module("roll.platforms").current_platform
    type(platform).empty_cache = staticmethod(lambda: None)  # torch.cpu has none


def worker(**config: Any) -> Any:
    """The values that a strategy reads from its worker, at ROLL's defaults."""
    model_args = config.pop("model_args", {})
    values = {
        "output_dir": "/nowhere",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.01,
        "max_steps": 100,
        "lr_scheduler_type": "linear",
        "report_to": [],
        "use_cpu": True,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "weight_decay": 0.0,
        **config.pop("training_args", {}),
    }
    training_args = SimpleNamespace(
        **values, to_dict=lambda: dict(values), get_warmup_steps=lambda steps: 0
    )
    return SimpleNamespace(
        rank_info=SimpleNamespace(dp_rank=0, dp_size=1, tp_size=1, cp_size=1),
        pipeline_config=SimpleNamespace(max_grad_norm=1.0, sequence_length=8),
        worker_config=SimpleNamespace(
            name=NAME,
            training_args=training_args,
            model_args=SimpleNamespace(lora_target=None, **model_args),
            strategy_args=SimpleNamespace(strategy_config=config),
            use_sequence_packing=False,
            use_dynamic_batching_in_train=False,
            use_dynamic_batching_in_infer=False,
            apply_loss_scale=True,
            router_replay=SimpleNamespace(mode="disabled"),
            offload_nccl=False,
            checkpoint_config={},
        ),
    )


def batch(number: int) -> Any:
    """Batch ``number``, in the form of ROLL's data protocol."""
    protocol = importlib.import_module("roll.distributed.scheduler.protocol")
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 32, (4, 8), generator=generator)
    tensors = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "position_ids": torch.arange(8).expand(4, 8).contiguous(),
    }
    made = protocol.DataProto.from_single_dict(tensors)
    made.meta_info = {"loss_mask_keys": [], "global_step": 0}
    return made


@dataclass
class Loss:
    weight: float = 1.0

    def __call__(self, data: Any, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        flat = logits.float().flatten(0, -2)
        targets = data.batch["input_ids"].flatten()
        loss = torch.nn.functional.cross_entropy(flat, targets) * self.weight
        return loss, {"loss": float(loss.detach())}


@dataclass
class Trainer:
    """A ROLL strategy that trains a tiny model."""

    strategy: Any

    @classmethod
    def of(
        cls, dtype: torch.dtype = torch.float16, moe: int | None = None, **config: Any
    ) -> Trainer:
        """Build a model on Megatron as ROLL does."""
        module = importlib.import_module("roll.distributed.strategy.megatron_strategy")
        flags = {"fp16": dtype is torch.float16, "bf16": dtype is torch.bfloat16}
        config = {"use_distributed_optimizer": True, **flags, **config}
        strategy = module.MegatronTrainStrategy(worker(**config))
        with _without_tokenizer(module):
            strategy.initialize(lambda **ignored: _virtual(dtype, moe))
        return cls(strategy)

    def step(self, number: int, weight: float = 1.0) -> dict[str, float]:
        """ROLL's metrics of a step, without the worker's name."""
        found = self.strategy.train_step(batch(number), Loss(weight))
        return {key.removeprefix(f"{NAME}/"): value for key, value in found.items()}

    def norm(self, number: int, weight: float = 1.0) -> float:
        """The norm that ROLL reports for a step."""
        return float(self.step(number, weight)["grad_norm"])

    def save(self, directory: Path) -> None:
        """Write a checkpoint as ROLL does; a GPT lacks mcore_adapter's ``save_pretrained``."""
        own = importlib.import_module("mcore_adapter.checkpointing")
        platform = type(importlib.import_module("roll.platforms").current_platform)
        (model,) = self.strategy.models_unwrapped

        def save_pretrained(folder: str, ckpt_format: str) -> None:
            config = SimpleNamespace(save_pretrained=lambda folder: Path(folder).mkdir())
            state = {"model": own.generate_model_state_dict(model, ckpt_format)}
            own.save_config_and_state_dict(folder, config, state, ckpt_format)

        model.save_pretrained = save_pretrained
        random = staticmethod(torch.get_rng_state)
        with mock.patch.object(platform, "get_rng_state", random, create=True):
            self.strategy.save_checkpoint(str(directory), 3, directory.name, is_last_step=True)

    @property
    def scalers(self) -> list[Any]:
        parts = getattr(self.strategy.optimizer, "chained_optimizers", [self.strategy.optimizer])
        return [one.grad_scaler for one in parts]

    def parameters(self) -> list[torch.Tensor]:
        chunks = self.strategy.models_wrapped
        return [one.detach().clone() for chunk in chunks for one in chunk.parameters()]


def _virtual(dtype: torch.dtype, moe: int | None) -> Any:
    """mcore_adapter's list of models, containing tiny models."""
    factory = importlib.import_module("mcore_adapter.models.model_factory")
    provider = tiny_gpt(dtype, num_moe_experts=moe)

    def make(config: Any, **ignored: Any) -> Any:
        model = provider().to(dtype)
        # mcore_adapter's models split a batch for context parallelism; a GPT makes its own mask.
        model.get_batch_on_this_cp_rank = lambda features, **ignored: {
            name: None if name == "attention_mask" else value for name, value in features.items()
        }
        return model

    torch.manual_seed(0)
    return factory.VirtualModels(make, provider.config)


@contextmanager
def _without_tokenizer(module: Any) -> Iterator[None]:
    answers = {
        "default_tokenizer_provider": lambda **ignored: None,
        "default_processor_provider": lambda **ignored: None,
    }
    with mock.patch.multiple(module, **answers):
        yield


def skipped(trainer: Trainer, number: int) -> bool:
    """Whether an overflowing step leaves the parameters unchanged and reports NaN."""
    before = trainer.parameters()
    norm = trainer.norm(number, OVERFLOW)
    return math.isnan(norm) and all(map(torch.equal, before, trainer.parameters()))
