"""Shared by the NeMo-RL tests: a tiny model, its policy config and data, and real workers."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from ..stand_ins.tiny_models import VOCABULARY

LENGTH = 12

try:
    NEMO_RL = Version(Version(version("nemo-rl")).base_version)
except PackageNotFoundError:
    NEMO_RL = Version("0")

WORKERS = "nemo_rl.models.policy" + ("" if Version("0.5") > NEMO_RL else ".workers")
NAMES = {
    "v1": f"{WORKERS}.dtensor_policy_worker:DTensorPolicyWorker",
    "v2": f"{WORKERS}.dtensor_policy_worker_v2:DTensorPolicyWorkerV2",
    "value": "nemo_rl.models.value.workers.dtensor_value_worker_v2:DTensorValueWorkerV2",
}
KINDS = ("v1", "v2", "value") if Version("0.7") <= NEMO_RL else ("v1", "v2")
each_kind = pytest.mark.parametrize("kind", KINDS)


def common(model: Path, precision: str) -> dict[str, Any]:
    """The keys of every policy config."""
    return {
        "model_name": str(model),
        "tokenizer": {"name": str(model)},
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "generation_batch_size": 1,
        "max_total_sequence_length": LENGTH,
        "make_sequence_length_divisible_by": 1,
        "precision": precision,
        "offload_optimizer_for_logprob": False,
        "dynamic_batching": {"enabled": False},
        "sequence_packing": {"enabled": False},
        "max_grad_norm": 1.0,
    }


def optimizer(lr: float) -> dict[str, Any]:
    """The section of AdamW."""
    # If eps were below fp16's rounding, signs of gradients near 0 would decide a step.
    kwargs = {"lr": lr, "betas": [0.9, 0.95], "eps": 1e-3, "foreach": False}
    return {"name": "torch.optim.AdamW", "kwargs": kwargs}


def policy_config(model: Path, precision: str, kind: str = "v1", **changes: Any) -> dict[str, Any]:
    """A policy config with the keys of NeMo-RL's YAML; ``changes`` replace keys."""
    config: dict[str, Any] = {
        **common(model, precision),
        "dtensor_cfg": {
            "enabled": True,
            "_v2": kind != "v1",
            "cpu_offload": False,
            "sequence_parallel": False,
            "activation_checkpointing": False,
            "tensor_parallel_size": 1,
            "context_parallel_size": 1,
            "custom_parallel_plan": None,
        },
        "optimizer": optimizer(1e-2),
        "scheduler": {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 20}},
    }
    if kind == "value":
        config["reward_model_cfg"] = {"enabled": True, "reward_model_type": "regression"}
    config.update(changes)
    return config


def batch(size: int = 4, seed: int = 0) -> Any:
    """Random token sequences for supervised training, with the columns that a value model needs."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (size, LENGTH), generator=generator)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((size,), LENGTH),
            "token_mask": torch.ones(size, LENGTH),
            "sample_mask": torch.ones(size),
            "returns": torch.rand(size, LENGTH, generator=generator),
            "values": torch.zeros(size, LENGTH),
        }
    )


def nll_loss() -> Any:
    """NeMo-RL's own loss of supervised training, whose class was moved and renamed over time."""
    for module, name in (
        ("nemo_rl.algorithms.loss", "NLLLossFn"),
        ("nemo_rl.algorithms.loss_functions", "NLLLoss"),
    ):
        with contextlib.suppress(ModuleNotFoundError, AttributeError):
            return getattr(importlib.import_module(module), name)()
    raise AssertionError("this NeMo-RL has no NLL loss where it was")


def loss_for(kind: str) -> Any:
    """Return NeMo-RL's own loss for a kind of worker."""
    if kind != "value":
        return nll_loss()
    from nemo_rl.algorithms.loss.loss_functions import MseValueLossConfig, MseValueLossFn

    return MseValueLossFn(MseValueLossConfig())


def actor_class(kind: str) -> Any:
    """The actor class that NeMo-RL exports for a kind of worker."""
    module, _, name = NAMES[kind].partition(":")
    return getattr(importlib.import_module(module), name)


def plain(kind: str) -> Any:
    """The plain class of the Ray actor for a kind of worker, with the shim on or off."""
    return actor_class(kind).__ray_metadata__.modified_class.__ray_actor_class__


def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def make_worker(kind: str, config: dict[str, Any], **arguments: Any) -> Any:
    """Make a real worker in this process; ``nemo_rl_on_cpu`` has to be active."""
    model = config["model_name"]
    given: dict[str, Any] = {"init_reference_model": False, **arguments}
    if kind == "value":
        given.pop("init_reference_model")
    if kind != "v2" or Version("0.6") > NEMO_RL:
        given["tokenizer"] = tokenizer(model)
    torch.manual_seed(0)  # each worker initializes its value head at random
    return plain(kind)(json.loads(json.dumps(config)), **given)


def save(worker: Any, folder: Path, *, optimizer: bool = True) -> None:
    """Save as NeMo-RL's loops do: the weights, and the optimizer if ``optimizer`` is true."""
    given: dict[str, Any] = {"weights_path": str(folder / "weights")}
    if optimizer:
        given["optimizer_path"] = str(folder / "optimizer")
    if "checkpointing_cfg" in inspect.signature(worker.save_checkpoint).parameters:
        given["checkpointing_cfg"] = {
            "enabled": True,
            "model_save_format": "safetensors",
            "save_consolidated": False,
            "is_async": False,
        }
    worker.save_checkpoint(**given)


def parameters(worker: Any) -> dict[str, torch.Tensor]:
    """Copies of a worker's unsharded parameters, each in its own dtype."""
    from torch.distributed.fsdp import FSDPModule

    for module in worker.model.modules():
        if isinstance(module, FSDPModule):  # an evaluation may leave parameters gathered in fp16
            module.reshard()
    return {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone()
        for name, one in worker.model.named_parameters()
    }


def scaler_of(owner: Any) -> Any:
    """The loss scaler of a worker; ``None`` if it has none."""
    from precision_shim_adapters.torch_fp16 import ScaledTraining

    training = ScaledTraining.of(owner)
    return training.scaler if training is not None else None
