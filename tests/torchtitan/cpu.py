"""Runs the real torchtitan (0.3.0, or its main branch) on a CPU, in this process.

torchtitan names a GPU in few places, and its RL package imports vLLM to register a model. This
module replaces GPU and vLLM. The real ``PolicyTrainer`` and ``Trainer`` are then built by their own
``__init__``, train, save and resume over gloo.

``varlen_by_sdpa`` replaces ``varlen_attn`` (CUDA only) by SDPA for each document, in the inputs'
dtype. The harness shows nothing about CUDA's kernels or speed.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

RL = "torchtitan.experiments.rl"
TRAINER = f"{RL}.actors.trainer"
VOCABULARY, LENGTH = 64, 16


# -- stand-ins for a GPU -----------------------------------------------------------------------


def answer_for_gpus() -> None:
    """Let torchtitan be imported and built without a GPU and without vLLM; never undone.

    The shim may be installed before or after this call, which does not import torchtitan.
    """
    import torch
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    numbers = {"total_memory": 2**34}
    answers: dict[str, Callable[..., Any]] = {
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: types.SimpleNamespace(**numbers),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    for name, answer in answers.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, answer)
    # torch.cpu.get_device_name and current_device would answer that there is no device.
    torch.cpu.get_device_name = answers["get_device_name"]
    torch.cpu.current_device = lambda: 0
    if RL not in sys.modules:
        # The RL package's own __init__ imports vLLM.
        (place,) = importlib.util.find_spec("torchtitan").submodule_search_locations
        bare = types.ModuleType(RL)
        bare.__path__ = [str(Path(place, "experiments", "rl"))]
        sys.modules[RL] = bare


def varlen_by_sdpa(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    **options: Any,
) -> Any:
    """The result of torch's ``varlen_attn``, computed by SDPA for each document."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    SEEN.add(query.dtype)
    assert window_size in ((-1, 0), (-1, -1))
    bounds = cu_seq_q.tolist()
    found = [
        scaled_dot_product_attention(
            *(one[begin:end].transpose(0, 1).unsqueeze(0) for one in (query, key, value)),
            is_causal=window_size == (-1, 0),
            scale=scale,
            enable_gqa=options.get("enable_gqa", False),
        )
        .squeeze(0)
        .transpose(0, 1)
        for begin, end in pairwise(bounds)
        if end > begin
    ]
    out = torch.cat(found)
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, len(query) - len(out)))


SEEN: set[Any] = set()
"""The dtypes in which attention was computed."""


def enter(world: int = 1, rank: int = 0, store: str | None = None) -> None:
    """Import torchtitan on a CPU and join a process group, for the rest of the process.

    Args:
        world: number of processes.
        rank: the rank of this process.
        store: path of the rendezvous file, which must not exist yet; None if one process.
    """
    answer_for_gpus()
    import torch
    import torch.distributed as dist

    if store is None:
        store = os.path.join(tempfile.mkdtemp(prefix="torchtitan"), "store")
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{store}", world_size=world, rank=rank)
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan sets it
    imports()


def imports(*, rl: bool = True) -> None:
    """Import the trainers, and replace ``varlen_attn`` in torchtitan's attention module.

    Args:
        rl: whether to import the RL trainer, which needs Monarch.
    """
    import torchtitan.models.common.attention as attention
    import torchtitan.trainer as trainer

    if rl:
        importlib.import_module(TRAINER)

    attention.varlen_attn = varlen_by_sdpa
    # The trainer of torchtitan sleeps for 2 s after each training.
    trainer.time = types.SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})


# -- models and configs ------------------------------------------------------------------------


def packed() -> bool:
    """Whether a batch is one row of tokens, as on torchtitan's main branch."""
    from torchtitan.config import TrainingConfig

    return "max_context_length" in TrainingConfig.__dataclass_fields__


def model_spec(*, experts: bool = False, layers: int = 2) -> Any:
    """A tiny Qwen3 with varlen attention, dense or with experts."""
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.protocols.model_spec import ModelSpec

    dim, head = 32, 16
    shared: dict[str, Any] = {
        "n_layers": layers,
        "dim": dim,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": head,
        "attn_backend": "varlen",
        "rope": CosSinRoPE.Config(
            **{"max_context_length" if packed() else "max_seq_len": 64}, dim=head, theta=10000.0
        ),
    }
    if experts:
        blocks = qwen3._build_qwen3_moe_layers(
            **shared, moe_hidden_dim=32, num_experts=4, top_k=2, moe_comm_backend="standard"
        )
    else:
        blocks = qwen3._build_qwen3_layers(**shared, hidden_dim=64)
    return ModelSpec(
        name="qwen3",
        flavor="tiny",
        model=qwen3.Qwen3Model.Config(
            vocab_size=VOCABULARY,
            dim=dim,
            norm=qwen3._qwen3_norm(dim),
            tok_embeddings=Embedding.Config(
                num_embeddings=VOCABULARY, embedding_dim=dim, param_init=qwen3._EMBEDDING_INIT
            ),
            lm_head=Linear.Config(
                in_features=dim, out_features=VOCABULARY, param_init=qwen3._LINEAR_INIT
            ),
            layers=blocks,
        ),
        parallelize_fn=qwen3.parallelize_qwen3,
        pipelining_fn=qwen3.pipeline_llm,
        post_optimizer_build_fn=qwen3.register_moe_load_balancing_hook,
        state_dict_adapter=None,
    )


def chunked(loss: Any, chunks: int = 2) -> Any:
    from torchtitan.components.loss import ChunkedLossWrapper

    return ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=loss)


def sections(folder: Path | str, dtype: str, **changes: Any) -> dict[str, Any]:
    """The parts of a config that ``PolicyTrainer`` and ``Trainer`` share.

    Args:
        folder: directory for the trainer's files.
        dtype: ``mixed_precision_param``.
        **changes: ``training``, ``parallelism``, ``checkpoint``, ``compile``, ``debug``: mappings
            of keys to values; ``optimizer``: the implementation; ``parts``: accumulation steps.
    """
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig

    # If eps were below fp16's rounding, signs of gradients near 0 would decide a step.
    optimizer = default_adamw(lr=1e-2, eps=1e-4)
    optimizer.implementation = changes.get("optimizer", "foreach")
    keys: dict[str, Any] = {"steps": 20, "disable_cuda_graphs": True}
    parts = changes.get("parts", 1)
    if packed():
        keys |= {
            "num_tokens_per_microbatch_per_dp_rank": 2 * LENGTH,
            "num_tokens_per_train_step": 2 * LENGTH * parts if parts > 1 else -1,
            "max_context_length": LENGTH,
        }
    else:
        keys |= {"local_batch_size": 2, "seq_len": LENGTH}
        keys |= {"global_batch_size": 2 * parts} if parts > 1 else {}
    return {
        "optimizer": optimizer,
        "lr_scheduler": LRSchedulersContainer.Config(
            warmup_steps=2, decay_ratio=0.8, decay_type="linear", min_lr_factor=0.1
        ),
        "training": TrainingConfig(
            **keys | {"mixed_precision_param": dtype} | dict(changes.get("training", {}))
        ),
        "parallelism": ParallelismConfig(**changes.get("parallelism", {})),
        "debug": DebugConfig(seed=3, enable_structured_logging=False, **changes.get("debug", {})),
        "checkpoint": CheckpointManager.Config(
            **{"enable": False, "folder": "checkpoint", "interval": 1}
            | dict(changes.get("checkpoint", {}))
        ),
        "compile": CompileConfig(**changes.get("compile", {})),
    }


def policy_config(folder: Path | str, dtype: str = "float16", **changes: Any) -> Any:
    """A ``PolicyTrainer.Config``; see ``sections``. ``chunks`` makes the loss chunked."""
    from torchtitan.experiments.rl.actors.trainer import PolicyTrainer
    from torchtitan.experiments.rl.losses import GRPOLoss

    found = sections(folder, dtype, **changes)
    found.pop("compile")
    loss = GRPOLoss.Config()
    if changes.get("chunks"):
        loss = chunked(loss, changes["chunks"])
    return PolicyTrainer.Config(loss=loss, ac_config=None, dump_folder=str(folder), **found)


def policy_trainer(folder: Path | str, dtype: str = "float16", **changes: Any) -> Any:
    """A real ``PolicyTrainer``, built by its own ``__init__``.

    Args:
        folder: directory for the trainer's files.
        dtype: ``mixed_precision_param``.
        **changes: see ``sections``; ``generator_dtype``, ``experts``, ``layers``.
    """
    from torchtitan.config import CompileConfig
    from torchtitan.experiments.rl.actors.trainer import PolicyTrainer

    config = changes.get("config") or policy_config(folder, dtype, **changes)
    return PolicyTrainer(
        config,
        model_spec=model_spec(
            experts=changes.get("experts", False), layers=changes.get("layers", 2)
        ),
        compile_config=CompileConfig(**changes.get("compile", {})),
        generator_dtype=changes.get("generator_dtype", ""),
        output_dir=str(folder),
    )


def trainer_config(folder: Path | str, dtype: str = "float16", **changes: Any) -> Any:
    """A ``Trainer.Config``; see ``sections``. ``chunks`` makes the loss chunked."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.trainer import Trainer

    from .data import Words, WordTokenizer

    loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    if changes.get("chunks"):
        loss = chunked(loss, changes["chunks"])
    return changes.get("kind", Trainer).Config(
        loss=loss,
        activation_checkpoint=None,
        dump_folder=str(folder),
        hf_assets_path=str(folder),
        tokenizer=WordTokenizer.Config(),
        dataloader=Words.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        model_spec=model_spec(
            experts=changes.get("experts", False), layers=changes.get("layers", 2)
        ),
        **sections(folder, dtype, **changes),
    )


def pretrainer(folder: Path | str, dtype: str = "float16", **changes: Any) -> Any:
    """A real ``Trainer``, built by its own ``__init__``; see ``trainer_config``."""
    from torchtitan.trainer import Trainer

    config = changes.get("config") or trainer_config(folder, dtype, **changes)
    return changes.get("kind", Trainer)(config)


# -- calling a PolicyTrainer's endpoints -------------------------------------------------------


class _Port:
    def __init__(self, done: asyncio.Future[Any]) -> None:
        self.done = done

    def send(self, found: Any) -> None:
        self.done.set_result(found)

    def exception(self, error: BaseException) -> None:
        # Monarch wraps the endpoint's error in its own error class.
        self.done.set_exception(getattr(error, "exception", error))


def endpoint(trainer: Any, name: str, *arguments: Any, **options: Any) -> Any:
    """Call an endpoint of a ``PolicyTrainer`` as its actor would, and wait for its answer."""

    async def call() -> Any:
        port = _Port(asyncio.get_running_loop().create_future())
        method = getattr(type(trainer), name)._method
        await method(trainer, port, *arguments, **options)
        return await port.done

    return asyncio.run(call())


def microbatch(seed: int, *, advantage: float = 1.0, size: int = 2) -> Any:
    """One rank's part of a batch; each row has two documents."""
    import torch
    from torchtitan.experiments.rl.types import TrainingMicrobatch

    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, VOCABULARY, (size, LENGTH + 1), generator=generator)
    half = LENGTH // 2
    found = {
        "token_ids": words[:, :-1],
        "labels": words[:, 1:],
        "positions": torch.arange(half).repeat(size, 2),
        "generator_logprobs": torch.full((size, LENGTH), -4.0),
        "loss_mask": torch.ones(size, LENGTH, dtype=torch.bool),
        "advantages": advantage * torch.randn(size, LENGTH, generator=generator),
    }
    if packed():
        found = {name: one.flatten() for name, one in found.items()}
    return TrainingMicrobatch(**found)


def policy_step(trainer: Any, step: int, advantage: float = 1.0, parts: int = 3) -> Any:
    """Call ``forward_backward`` several times and ``optim_step`` once; returns both results."""
    for part in range(parts):
        data = [
            microbatch(1000 * step + 10 * part + rank, advantage=advantage)
            for rank in range(trainer.dp_size)
        ]
        found = endpoint(trainer, "forward_backward", data, parts * 2 * LENGTH * trainer.dp_size)
    return found, endpoint(trainer, "optim_step")


def local(tensor: Any) -> Any:
    """A copy of a tensor's values on this rank."""
    tensor = tensor.detach()
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()


def values(trainer: Any) -> dict[str, Any]:
    """Copies of this rank's parameters, buffers and optimizer states, by name."""
    found = {}
    for part in trainer.model_parts:
        for name, one in (*part.named_parameters(), *part.named_buffers()):
            found[name] = local(one)
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                for key, one in optimizer.state.get(parameter, {}).items():
                    found[f"{name}.{key}"] = local(one)
    return found
