"""Drives ROLL's FSDP2 strategy on a CPU: its ``initialize``, ``train_step`` and checkpoints.

The strategy, FSDP2 over gloo with one rank, a tiny Llama of transformers', and torch's distributed
checkpoints are real. The tests provide the worker, the tokenizer, and the random states of a
device, because ``torch.cpu`` has no functions for random states.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from .driving import NAME, Loss, batch, worker

MODULE = "roll.distributed.strategy.fsdp2_strategy"


def tiny() -> Any:
    transformers = importlib.import_module("transformers")
    return transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        tie_word_embeddings=False,
    )


@dataclass
class Trainer:
    """A ROLL strategy that trains a tiny Llama."""

    strategy: Any

    @classmethod
    def of(
        cls,
        directory: Path,
        dtype: str | None = "float16",
        ulysses: Any = 1,
        *,
        stored: torch.dtype | None = None,
        **config: Any,
    ) -> Trainer:
        """Build a model as ROLL does; the model's config is written into ``directory``.

        Args:
            directory: the model's.
            dtype: ROLL's ``param_dtype``.
            ulysses: ROLL's ``ulysses_size``.
            stored: dtype of the parameters, if it is not the one in which ROLL loads a model.
            config: more keys of ROLL's ``strategy_config``.
        """

        def provide(model_args: Any, **ignored: Any) -> Any:
            kept = stored or model_args.compute_dtype or torch.float32
            return transformers.LlamaForCausalLM(tiny()).to(kept)

        module = importlib.import_module(MODULE)
        transformers = importlib.import_module("transformers")
        tiny().save_pretrained(directory)
        named = {} if "model_args" in config else {"param_dtype": dtype}
        one = worker(**named, **config)
        one.pipeline_config.seed = 0
        vars(one.worker_config.model_args).update(
            ulysses_size=ulysses, model_name_or_path=str(directory), model_config_kwargs={}
        )
        strategy = module.FSDP2TrainStrategy(one)
        with _answered(module):
            strategy.initialize(provide)
        strategy.tokenizer = SimpleNamespace(save_pretrained=lambda directory: None)
        return cls(strategy)

    def with_rolls_own_scaler(self) -> Trainer:
        """Set the scaler that ROLL itself would make, for gradients on a CPU."""
        self.strategy.scaler = ShardedGradScaler(device="cpu", growth_interval=400)
        return self

    def step(self, number: int, weight: float = 1.0, **more: Any) -> dict[str, Any]:
        """ROLL's metrics of a step, without the worker's name."""
        found = self.strategy.train_step(batch(number), Loss(weight), **more)
        return {key.removeprefix(f"{NAME}/"): value for key, value in found.items()}

    def end_by_hand(self) -> None:
        """Move the scheduler and clear gradients, which ROLL omits after a step of its scaler."""
        self.strategy.scheduler.step()
        self.strategy.optimizer.zero_grad(set_to_none=True)

    def save(self, directory: Path, *, last: bool = True) -> None:
        """Write a checkpoint, in the background unless it is the job's last, and wait for it."""
        with _answered(importlib.import_module(MODULE)):
            self.strategy.save_checkpoint(str(directory), 3, "checkpoint-3", is_last_step=last)
        if self.strategy.checkpoint_future is not None:
            self.strategy.checkpoint_future.result()

    def load(self, directory: Path) -> None:
        with _answered(importlib.import_module(MODULE)):
            self.strategy.load_checkpoint(str(directory))

    @property
    def moved(self) -> int:
        """How many steps the scheduler has taken."""
        return int(self.strategy.scheduler.last_epoch)

    @property
    def cleared(self) -> bool:
        return all(one.grad is None for one in self.strategy.model.parameters())

    def parameters(self) -> list[torch.Tensor]:
        held: list[Any] = list(self.strategy.model.parameters())
        return [one.detach().to_local().clone() for one in held]

    def moments(self) -> list[torch.Tensor]:
        """The optimizer's states, with the step counts."""
        states: list[Any] = list(self.strategy.optimizer.state.values())
        assert states
        return [
            one.to_local().clone() if hasattr(one, "to_local") else one.clone()
            for state in states
            for one in state.values()
        ]


@contextmanager
def _answered(module: Any) -> Iterator[None]:
    platform = type(module.current_platform)
    answers = {
        "download_model": lambda path: path,  # ROLL's own function asks a Ray actor first
        "default_tokenizer_provider": lambda **ignored: None,
        "default_processor_provider": lambda **ignored: None,
    }
    random = {
        "get_rng_state": staticmethod(torch.get_rng_state),
        "set_rng_state": staticmethod(torch.set_rng_state),
    }
    with (
        mock.patch.multiple(module, **answers),
        mock.patch.multiple(platform, create=True, **random),
    ):
        yield
