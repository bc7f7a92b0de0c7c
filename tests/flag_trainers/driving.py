"""Drives ``setup_model_and_optimizer`` and ``train_one_step`` of slime or miles on a CPU.

Megatron's flags and their validation, its ``get_model``, DDP, optimizer and schedule are real, and
so is the trainer's own module. The tests provide the model (a tiny GPT), the batch and the loss.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from precision_shim_tools.testing import tiny_gpt

SCALE = 1024.0
OVERFLOW = 1e30
FLAGS = """
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8
    --max-position-embeddings 8 --micro-batch-size 4 --global-batch-size 4 --lr 0.01
    --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --use-distributed-optimizer --train-iters 100 --no-rope-fusion --tokenizer-type NullTokenizer
    --vocab-size 31 --no-bias-swiglu-fusion
"""
OWN = {
    "use_stateless_adam": False,
    "custom_megatron_before_train_step_hook_path": None,
    "rollout_top_p": 1.0,
    "data_pad_size_multiplier": 1,
    "allgather_cp": False,
    "ci_test": False,
    "enable_mtp_training": False,
    "load": "somewhere",
    "num_rollout": 100,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 1,
    "debug_disable_optimizer": False,
    "stream_optimizer_state_to_disk": False,
    "multi_lora_n_adapters": 0,
    "lora_rank": 0,
    "enable_gloo_process_groups": True,
    "lora_adapter_path": None,
    "qkv_format": "thd",
    "enable_witness": False,
    "megatron_to_hf_mode": "raw",
    "dumper_enable": False,
    "dumper_fwd_bwd": None,
    "save_local_weight_checksum": False,
    "custom_model_provider_path": None,
}
"""The attributes that slime's and miles' own parsers add to Megatron's, at their defaults."""


def parse(*flags: str) -> Any:
    """Make a job's namespace with Megatron's own parser and validation."""
    from megatron.training import arguments

    words = ["train.py", *FLAGS.split(), *(() if "--fp16" in flags else ("--bf16",)), *flags]
    with mock.patch.object(sys, "argv", words), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # argparse's "type", missing GPU features
        args = arguments.parse_args(ignore_unknown_args=True)
        args.rank, args.world_size = 0, 1
        args = arguments.validate_args(args)
    vars(args).update({name: value for name, value in OWN.items() if not hasattr(args, name)})
    args.load = OWN["load"]
    return args


@dataclass
class Trainer:
    """A model, its optimizer, and the trainer's own module, which steps them."""

    module: ModuleType
    args: Any
    chunks: list[Any]
    optimizer: Any
    scheduler: Any

    @classmethod
    def of(cls, name: str, *flags: str, role: str = "actor", **own: Any) -> Trainer:
        """Build a tiny model as the trainer does."""
        from megatron.training import global_vars

        module = importlib.import_module(f"{name}.backends.megatron_utils.model")
        args = parse(*flags)
        vars(args).update(own)
        global_vars._GLOBAL_ARGS = args
        _tell_miles_of_its_ranks(name)
        provider = tiny_gpt(args.params_dtype, fp16=args.fp16, bf16=args.bf16)
        torch.manual_seed(0)
        with mock.patch.object(module, "get_model_provider_func", return_value=provider):
            return cls(module, args, *module.setup_model_and_optimizer(args, role))

    def step(self, number: int, weight: float = 1.0) -> tuple[dict[str, Any], float]:
        """Train on batch ``number``; returns the trainer's metrics and norm."""
        from megatron.core.utils import get_model_config

        if self.optimizer is not None:  # as in their ``train``
            get_model_config(self.chunks[0]).grad_scale_func = self.optimizer.scale_loss
        answers = {"get_batch": lambda *a, **k: _batch(number), "loss_function": _loss(weight)}
        more = {"witness_info": None, "attempt": 0} if "miles" in self.module.__name__ else {}
        if "miles" in self.module.__name__:
            answers["get_packed_seq_params"] = lambda *a: None
        with mock.patch.multiple(self.module, **answers):
            found = self.module.train_one_step(
                self.args, 0, 0, [None], self.chunks, self.optimizer, self.scheduler, 1, 4, **more
            )
        return found[0], float(found[1])

    def norm(self, number: int, weight: float = 1.0) -> float:
        """The norm that the trainer reports for a step."""
        return self.step(number, weight)[1]

    @property
    def scalers(self) -> list[Any]:
        return [one.grad_scaler for one in self.optimizer.chained_optimizers]

    def parameters(self) -> list[torch.Tensor]:
        return [one.detach().clone() for chunk in self.chunks for one in chunk.parameters()]


def _tell_miles_of_its_ranks(name: str) -> None:
    """Record the process groups for miles, as its actor does."""
    if name == "miles" and importlib.util.find_spec("miles.backends.training_utils") is not None:
        own = importlib.import_module("miles.backends.megatron_utils.parallel")
        groups = importlib.import_module("miles.utils.ft_utils.process_group_utils")
        state = importlib.import_module("miles.backends.training_utils.parallel")
        alone = groups.GroupInfo(rank=0, size=1, group=None)
        state.set_parallel_state(own.create_megatron_parallel_state(indep_dp=alone))


def _batch(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 32, (4, 8), generator=generator)
    nothing: dict[str, Any] = dict.fromkeys(
        ("multimodal_train_inputs", "packed_seq_params", "full_loss_masks")
    )
    return {"tokens": tokens, "unconcat_tokens": tokens, **nothing}


def _loss(weight: float) -> Callable[..., Any]:
    def loss(
        args: Any, batch: Any, count: int, *more: Any, **also: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        logits = more[-1]
        flat = logits.float().flatten(0, -2)
        mean = torch.nn.functional.cross_entropy(flat, batch["tokens"].flatten()) * weight
        values = torch.stack([torch.zeros(()), mean.detach() * 4])
        return mean, torch.tensor(1), {"keys": ["loss"], "values": values}

    return loss


def skipped(trainer: Trainer, number: int) -> bool:
    """Whether an overflowing step leaves the parameters unchanged and reports NaN."""
    before = trainer.parameters()
    norm = trainer.norm(number, OVERFLOW)
    return math.isnan(norm) and all(map(torch.equal, before, trainer.parameters()))
