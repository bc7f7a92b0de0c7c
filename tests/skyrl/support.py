"""Shared by the SkyRL tests: configs from a command line, and real workers on a CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from precision_shim_tools.testing.megatron_cpu import CPU_TRANSFORMER

from ..stand_ins.tiny_models import VOCABULARY


def python_path(*folders: Path) -> str:
    """``PYTHONPATH`` for another process, with the folder of the flash_attn placeholder."""
    placeholders = [one for one in sys.path if Path(one, "flash_attn").is_dir()]
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*map(str, folders), *placeholders, *([given] if given else [])])


def train_config(*overrides: str) -> Any:
    """SkyRL's own config from a command line, without features that need a GPU."""
    from skyrl.train.config import SkyRLTrainConfig

    packing = "use_sample_packing"
    fields = SkyRLTrainConfig().trainer.__dataclass_fields__
    if packing not in fields:
        packing = "remove_microbatch_padding"
    return SkyRLTrainConfig.from_cli_overrides(
        [
            f"trainer.{packing}=false",
            "trainer.flash_attn=false",
            "trainer.gradient_checkpointing=false",
            "trainer.logger=console",
            *overrides,
        ]
    )


def megatron_worker(
    checkpoint: Path, *overrides: str, config: Any = None, role: str = "policy"
) -> Any:
    """A real Megatron worker of SkyRL's without its model; ``.cfg`` is its config.

    Args:
        checkpoint: folder from ``make_checkpoint``.
        overrides: SkyRL's command line.
        config: a whole SkyRLTrainConfig instead of a command line.
        role: ``"policy"`` or ``"ref"``.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy
    from skyrl.backends.skyrl_train.workers.megatron import megatron_worker as module

    from .cpu import make_worker

    if config is None:
        config = train_config("trainer.strategy=megatron", *overrides)
    config.trainer.policy.model.path = str(checkpoint)
    section = getattr(config.trainer, role)
    section.megatron_config.transformer_config_kwargs.update(
        **CPU_TRANSFORMER,
        attention_backend="unfused",
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
    )
    kind = getattr(module, f"Megatron{role.capitalize()}WorkerBase")
    worker = make_worker(kind, config.trainer)
    # SkyRL's init_worker_process_group would also start Megatron's parallel state, again.
    worker.strategy = MegatronStrategy(
        megatron_config=section.megatron_config,
        optimizer_config=getattr(section, "optimizer_config", None),
        seed=worker.cfg.seed,
    )
    worker.strategy.world_size = 1
    return worker


def build(checkpoint: Path, *overrides: str, config: Any = None, role: str = "policy") -> Any:
    """A ``megatron_worker`` with the model, optimizer and scheduler of SkyRL's ``init_model``."""
    worker = megatron_worker(checkpoint, *overrides, config=config, role=role)
    worker.init_model(str(checkpoint))
    return worker


# -- FSDP --------------------------------------------------------------------------------------


def fsdp_config(role: str, checkpoint: Path, dtype: str | None, *overrides: str) -> Any:
    """SkyRL's config of an FSDP worker.

    Args:
        role: ``"policy"``, ``"critic"`` or ``"ref"``.
        checkpoint: folder from ``make_checkpoint``.
        dtype: ``mixed_precision.param_dtype``, or ``None`` for SkyRL's default.
        overrides: SkyRL's command line.
    """
    from skyrl.train.config import SkyRLTrainConfig

    strategy = SkyRLTrainConfig().trainer.strategy  # "fsdp2" in 0.2 is "fsdp" in 0.3
    mixed = f"trainer.{role}.fsdp_config.mixed_precision.param_dtype={dtype}"
    return train_config(
        f"trainer.strategy={strategy}",
        f"trainer.policy.model.path={checkpoint}",
        f"trainer.{role}.model.path={checkpoint}",
        *([f"trainer.{role}.optimizer_config.lr=1e-3"] if role != "ref" else []),
        *([mixed] if dtype else []),
        *overrides,
    )


def fsdp_worker(
    role: str,
    checkpoint: Path,
    dtype: str | None,
    *overrides: str,
    rank: int = 0,
    world_size: int = 1,
) -> Any:
    """A real FSDP worker of SkyRL's with a model; the process group must exist already."""
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker as module

    from .cpu import make_worker

    kind = getattr(module, f"FSDP{role.capitalize()}WorkerBase")
    config = fsdp_config(role, checkpoint, dtype, *overrides)
    worker = make_worker(kind, config.trainer, rank=rank, world_size=world_size)
    worker.init_worker_process_group()
    if role == "ref":
        worker.init_model(str(checkpoint))
    else:
        worker.init_model(str(checkpoint), num_training_steps=100)
    return worker


def batch(seed: int, *, advantage: float = 1.0, size: int = 2) -> Any:
    """A SkyRL training batch; the same seed gives the same batch."""
    import torch
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    generator = torch.Generator().manual_seed(seed)
    length, actions = 10, 4

    def ones(value: float) -> torch.Tensor:
        return value * torch.ones((size, actions))

    data = TrainingInputBatch(
        {
            "sequences": torch.randint(3, VOCABULARY, (size, length), generator=generator),
            "attention_mask": torch.ones((size, length), dtype=torch.int),
            "action_log_probs": ones(-4.0),
            "base_action_log_probs": ones(-4.0),
            "values": ones(0.5),
            "returns": ones(0.5 * advantage),
            "advantages": torch.randn((size, actions), generator=generator) * advantage,
            "loss_mask": torch.ones((size, actions), dtype=torch.int),
            "response_mask": torch.ones((size, actions), dtype=torch.int),
            "rollout_logprobs": ones(-4.0),
        }
    )
    data.metadata = {"response_length": actions}
    return data


def metrics_of(output: Any) -> dict[str, float]:
    """A worker's metrics, which are a dict in 0.2, and a field of the output from 0.3 on."""
    found = output if isinstance(output, dict) else output.metrics
    return {key: value for key, value in found.items() if isinstance(value, float)}


def scaler_of(owner: Any) -> Any:
    """The loss scaler of a strategy; ``None`` if it has none."""
    from precision_shim_adapters.torch_fp16 import ScaledTraining

    training = ScaledTraining.of(owner)
    return training.scaler if training is not None else None


# -- weights that are sent to the inference engines ----------------------------------------------


def weights_sent(worker: Any, dtype: Any, *, grouped: bool = False) -> dict[str, Any]:
    """An FSDP worker's stream of weights, by SkyRL's own class; all ranks must call this function.

    From 0.4 on the stream needs ``vllm_names``.

    Args:
        worker: from ``fsdp_worker``.
        dtype: the dtype of the engines.
        grouped: whether SkyRL groups weights by module, as it does for CUDA IPC up to 0.3.
    """
    try:
        from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPWeightExtractor
    except ImportError:
        from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource

        source = FsdpWeightSource(worker.model.model, dtype)
        assert {one.dtype for one in source.metadata()} == {dtype}
        return dict(source)
    extractor = FSDPWeightExtractor(
        worker.model.model, group_by_module=grouped, batch_size_threshold_gb=1.0
    )
    return {
        name: tensor
        for chunk in extractor.extract_weights(dtype)
        for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
    }


def weights_rounded_once(worker: Any, dtype: Any) -> dict[str, Any]:
    """The weights that a worker should send: unsharded, then rounded to the engines' dtype."""
    weights = whole(worker.model.model.state_dict())
    return {name: one.to(dtype) for name, one in weights.items()}


def whole(weights: dict[str, Any]) -> dict[str, Any]:
    """Gather each weight; all ranks must call this function."""
    found = {}
    for name, one in weights.items():
        gather = getattr(one, "full_tensor", None)
        found[name] = (one if gather is None else gather()).detach()
    return found


def equal_streams(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two streams have the same names, dtypes and values, bit for bit."""
    import torch

    return one.keys() == other.keys() and all(
        tensor.dtype is other[name].dtype and torch.equal(tensor, other[name])
        for name, tensor in one.items()
    )
