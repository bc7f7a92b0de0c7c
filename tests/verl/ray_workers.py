"""Shared by verl's workers in a Ray cluster: a CPU in place of the GPU, a loss, a report.

Ray's workers import this module. The module leaves installing the shim to the start-up file.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

BACKEND = "VERL_TEST_BACKEND"
"""The variable with a worker's backends: ``fsdp``, ``megatron``, or names of
``engine_support.MODULES``, with commas between; empty for a worker that trains nothing."""

_open = contextlib.ExitStack()
"""Contexts that stay open until the worker ends."""


def setup() -> None:
    """Ray's setup hook, which runs at the start of each worker."""
    names = list(filter(None, os.environ[BACKEND].split(",")))
    if not names:
        return
    import torch.distributed as dist

    own = dist.init_process_group
    dist.init_process_group = lambda *args, **kwargs: own(*args, **{**kwargs, "backend": "gloo"})
    if "fsdp" in names:
        from . import fsdp_support

        fsdp_support.prepare()
    if "megatron" in names:
        _prepare_megatron()
    if "automodel" in names:
        from . import engine_support

        engine_support.prepare()
    answer_for_gpus()


def answer_for_gpus() -> None:
    """Replace what verl's workers ask of a GPU or its driver."""
    from verl.utils import flops_counter
    from verl.workers import engine_workers
    from verl.workers.engine import base

    flops_counter.get_device_flops = lambda *args, **kwargs: 1.0  # it reads the GPU's name

    # verl lists engines by accelerator, so each engine for cuda is listed for the CPU as well.
    listed = base.EngineRegistry._engines
    for backends in listed.values():
        for devices in backends.values():
            if "cuda" in devices:
                devices.setdefault("cpu", devices["cuda"])
    if hasattr(engine_workers, "set_numa_affinity"):  # it needs a GPU driver
        engine_workers.set_numa_affinity = lambda: None


def _prepare_megatron() -> None:
    import torch

    from precision_shim_tools.testing import megatron_on_cpu, stand_in_transformer_engine

    _open.enter_context(stand_in_transformer_engine())
    from verl.workers.engine.megatron import transformer_impl

    transformer_impl.load_mcore_dist_weights = lambda *args, **kwargs: None  # no first weights
    from .support import local_layers

    _open.enter_context(megatron_on_cpu())
    _open.enter_context(local_layers())
    from megatron.core import parallel_state, tensor_parallel

    own = parallel_state.initialize_model_parallel

    def with_generators(*args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        # verl's checkpoints need Megatron's random generators, which verl seeds only on a GPU.
        tensor_parallel.model_parallel_cuda_manual_seed(1234)

    parallel_state.initialize_model_parallel = with_generators
    for name in ("empty_cache", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cpu, name, lambda *args: 0)


def worker_config(backend: str, model: str, world: int) -> Any:
    """verl's own config of a worker that trains a tiny model in fp16."""
    import inspect

    from verl.trainer.config import CheckpointConfig
    from verl.workers import config as verls

    from . import engine_support

    known = inspect.signature(verls.TrainingWorkerConfig).parameters

    def of(fields: dict[str, Any]) -> Any:
        fields["model_type"] = "language_model"
        return verls.TrainingWorkerConfig(**{k: v for k, v in fields.items() if k in known})

    if backend in engine_support.MODULES:
        return of(engine_support.configs(backend, model, world))
    if backend == "fsdp":
        engine = verls.FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision={"param_dtype": "fp16"},
            use_torch_compile=False,
            use_dynamic_bsz=False,
        )
        optimizer = verls.FSDPOptimizerConfig(lr=1e-2, total_training_steps=40)
    else:
        from .support import CPU_FIELDS, optim_config

        engine = verls.McoreEngineConfig(
            dtype="float16",
            vanilla_mbridge=True,
            use_dist_checkpointing=True,  # mbridge cannot save weights of Megatron's own layers
            override_transformer_config=dict(CPU_FIELDS),
            use_dynamic_bsz=False,
        )
        # By verl's default the LR schedule of a resumed Megatron job starts anew.
        optimizer = optim_config(use_checkpoint_opt_param_scheduler=True)
    contents = ["model", "optimizer", "extra"]
    return of(
        {
            "model_config": verls.HFModelConfig(
                path=model,
                use_remove_padding=False,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "eager"},
            ),
            "engine_config": engine,
            "optimizer_config": optimizer,
            "checkpoint_config": CheckpointConfig(save_contents=contents, load_contents=contents),
        }
    )


def weighted_loss(*args: Any, **kwargs: Any) -> Any:
    """verl's SFT loss, times the largest weight in the micro-batch."""
    from verl.workers.utils.losses import sft_loss

    loss, metrics = sft_loss(None, *args, **kwargs)
    data = kwargs["data"] if "data" in kwargs else args[1]
    return loss.float() * float(data["loss_weight"].max()), metrics


def report(worker: Any, backend: str) -> dict[str, Any]:
    """The state of a backend's worker; runs in its actor, which has a worker for each backend."""
    import hashlib
    import sys

    import torch

    from ..processes.loaded_tools import loaded_tools

    engine = worker.worker_dict[backend].engine
    chunks = engine.module if isinstance(engine.module, list) else [engine.module]
    digest = hashlib.sha256()
    for chunk in chunks:
        for one in chunk.parameters():
            local = one.to_local() if hasattr(one, "to_local") else one
            digest.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
    shim = sys.modules.get("precision_shim")
    frameworks = shim.status().frameworks if shim is not None else {}
    return {
        "pid": os.getpid(),
        "engine": type(engine).__name__,
        "shim": shim is not None and bool(frameworks),
        "wrapped": sorted(
            seam.target
            for seam in (frameworks["verl"].seams if "verl" in frameworks else ())
            if seam.state == "wrapped"
        ),
        "parameters": digest.hexdigest(),
        "tools": loaded_tools(),
    }


class Runner:
    """Replaces verl's ``TaskRunner``; verl accepts a user's own."""

    @classmethod
    def remote(cls) -> Any:
        """Return an actor; verl calls this method to make a task runner."""
        import ray

        return ray.remote(num_cpus=1, runtime_env={"env_vars": {BACKEND: ""}})(cls).remote()

    def run(self, config: Any) -> None:
        """Write the rollout's dtype that the actor's process reads from the config."""
        from verl.utils.config import omega_conf_to_dataclass

        import precision_shim

        made = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        states = precision_shim.status().to_dict()["frameworks"]["verl"]["seams"]
        named = [
            one["state"] for one in states if one["target"].endswith("RolloutConfig.__post_init__")
        ]
        found = {"rollout": made.dtype, "named": named}
        with open(config.trainer.default_local_dir, "w", encoding="utf-8") as answer:
            json.dump(found, answer)
