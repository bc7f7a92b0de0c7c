"""Shared by the tests of NeMo-RL's Megatron workers: a policy config and real workers on a CPU.

NeMo-RL's own worker runs its whole ``__init__``. NeMo-RL's code converts the worker's config into
Megatron-Bridge's; model, DDP, optimizer and scheduler are the real ones. ``on_cpu`` lists the
GPU functions that it replaces in addition to ``megatron_on_cpu`` and ``nemo_rl_on_cpu``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from packaging.version import Version

from precision_shim_tools.testing.megatron_cpu import CPU_TRANSFORMER, cuda_means_cpu

from ...stand_ins.megatron_bridge import import_megatron_bridge
from ..cpu import nemo_rl_on_cpu
from ..support import NEMO_RL, VOCABULARY, WORKERS, common

POLICY = f"{WORKERS}.megatron_policy_worker:MegatronPolicyWorker"
VALUE = "nemo_rl.models.value.workers.megatron_value_worker:MegatronValueWorker"

OPTIMIZER: dict[str, Any] = {
    "optimizer": "adam",
    "lr": 1e-2,
    "min_lr": 1e-3,
    "weight_decay": 0.01,
    "bf16": True,
    "fp16": False,
    "params_dtype": "float32",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "sgd_momentum": 0.9,
    "use_distributed_optimizer": True,
    "use_precision_aware_optimizer": False,
    "clip_grad": 1.0,
    "optimizer_cpu_offload": False,
    "optimizer_offload_fraction": 0.0,
}
"""The optimizer keys in NeMo-RL's YAML files, with the precision-aware optimizer off."""

FP16 = {"bf16": False, "fp16": True}
"""The optimizer keys that a user writes with ``policy.precision: float16``."""


def policy_config(
    model: Path,
    precision: str = "bfloat16",
    *,
    optimizer: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    ddp: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A policy config with the keys of NeMo-RL's YAML.

    Args:
        model: folder from ``make_checkpoint``.
        precision: ``policy.precision``.
        optimizer: keys of ``megatron_cfg.optimizer`` that replace those of ``OPTIMIZER``.
        drop: keys of ``OPTIMIZER`` to leave out.
        ddp: keys of ``megatron_cfg.distributed_data_parallel_config`` that replace the defaults.
        changes: further keys of the policy config.
    """
    settings = {key: value for key, value in OPTIMIZER.items() if key not in drop}
    settings |= optimizer or {}
    return {
        **common(model, precision),
        "logprob_chunk_size": None,
        "generation": None,
        "hf_config_overrides": {},
        "dtensor_cfg": {"enabled": False},
        "megatron_cfg": {
            "enabled": True,
            "empty_unused_memory_level": 0,
            "activation_checkpointing": False,
            "tensor_model_parallel_size": 1,
            "expert_tensor_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "num_layers_in_first_pipeline_stage": None,
            "num_layers_in_last_pipeline_stage": None,
            "context_parallel_size": 1,
            "pipeline_dtype": precision,
            "sequence_parallel": False,
            "freeze_moe_router": False,
            "moe_router_dtype": "fp64",
            "moe_router_load_balancing_type": "none",
            "moe_router_bias_update_rate": 0.0,
            "moe_permute_fusion": False,
            "moe_enable_deepep": False,
            "moe_token_dispatcher_type": "alltoall",
            "moe_shared_expert_overlap": False,
            "moe_per_layer_logging": False,
            "apply_rope_fusion": False,
            "bias_activation_fusion": False,
            "gradient_accumulation_fusion": False,
            "use_fused_weighted_squared_relu": False,
            "defer_fp32_logits": False,
            "force_overwrite_initial_ckpt": False,
            "train_iters": 20,
            "optimizer": settings,
            "scheduler": {
                "start_weight_decay": 0.01,
                "end_weight_decay": 0.01,
                "weight_decay_incr_style": "constant",
                "lr_decay_style": "constant",
                "lr_decay_iters": None,
                "lr_warmup_iters": 0,
                "lr_warmup_init": 0.0,
            },
            "distributed_data_parallel_config": {
                "grad_reduce_in_fp32": True,
                "overlap_grad_reduce": False,
                "overlap_param_gather": False,
                "use_custom_fsdp": False,
                "data_parallel_sharding_strategy": "optim_grads_params",
                **(ddp or {}),
            },
        },
        **changes,
    }


# -- what the packages on PyPI lack ------------------------------------------------------------


def import_worker_modules() -> None:
    """Import NeMo-RL's Megatron worker, which needs names that no package on PyPI has.

    NeMo-RL pins checkouts of Megatron-LM and Megatron-Bridge between two releases, and 0.5 imports
    vLLM through a helper. This function adds the missing names: a flag, functions that only
    generation calls, and the causal mask.
    """
    import_megatron_bridge()
    for name, values in _MISSING.items():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            parts = name.split(".")
            for depth in range(2, len(parts) + 1):
                full = ".".join(parts[:depth])
                if full not in sys.modules and importlib.util.find_spec(full) is None:
                    sys.modules[full] = types.ModuleType(full)
                    sys.modules[full].__path__ = []
            module = sys.modules[name] = sys.modules.get(name, types.ModuleType(name))
        for attribute, value in values.items():
            if not hasattr(module, attribute):
                setattr(module, attribute, value)
    for target in (POLICY, VALUE) if Version("0.7") <= NEMO_RL else (POLICY,):
        importlib.import_module(target.partition(":")[0])


def _not_here(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a placeholder for what only generation calls")


def _causal(data: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Stands in for Megatron's ``get_ltor_masks_and_position_ids``, for unpacked sequences."""
    length = data.size(1)
    later = torch.ones(1, 1, length, length).triu(1).bool()
    positions = torch.arange(length).unsqueeze(0).expand_as(data)
    return later, torch.ones(data.shape), positions


_MISSING: dict[str, dict[str, Any]] = {
    "megatron.training.utils": {"get_ltor_masks_and_position_ids": _causal},
    "megatron.inference.text_generation.mcore_engine_server": {"run_mcore_engine": _not_here},
    "megatron.bridge.training.setup": {"HAVE_FSDP2": False},
}
if Version("0.6") > NEMO_RL >= Version("0.5"):
    _MISSING["nemo_rl.models.generation.fp8"] = dict.fromkeys(
        ("convert_calibration_to_vllm_format", "get_vllm_qkv_scale_names"), _not_here
    )


# -- a worker ----------------------------------------------------------------------------------


@contextlib.contextmanager
def on_cpu(folder: Path) -> Iterator[None]:
    """Replace the GPU calls that ``megatron_on_cpu`` and ``nemo_rl_on_cpu`` do not replace.

    Megatron-Bridge requires a GPU at start, compiles helpers for data sets and warms up fused
    kernels. NeMo-RL pins commits of Megatron-LM and of Bridge between two releases. If a release on
    PyPI lacks a name that the worker reads, this function adds the name.
    """
    from megatron.bridge.training import initialize
    from megatron.bridge.training.config import TokenizerConfig
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.core.datasets import utils as datasets
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    setups = [
        module
        for module in (
            sys.modules.get("nemo_rl.models.megatron.setup"),
            sys.modules[POLICY.partition(":")[0]],
        )
        if module is not None
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(folder))
        patch.setenv("NRL_DISABLE_NUMA_BINDING", "1")
        patch.setenv("LOCAL_RANK", "0")
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "is_initialized", lambda: False, raising=False)
        for module in [initialize, *setups]:
            if hasattr(module, "set_jit_fusion_options"):
                patch.setattr(module, "set_jit_fusion_options", lambda *args, **kwargs: None)
        if not hasattr(TokenizerConfig, "padded_vocab_size"):
            patch.setattr(TokenizerConfig, "padded_vocab_size", VOCABULARY, raising=False)
        if not hasattr(np, "product"):
            # megatron-core 0.15 calls np.product for a checkpoint; numpy 2 has removed it.
            patch.setattr(np, "product", np.prod, raising=False)
        # On a CPU, move_model would return the model itself instead of a copy, and then free it.
        owner = next(one for one in plain(POLICY).__mro__ if "move_model" in vars(one))
        patch.setattr(owner, "move_model", lambda self, model, *args, **kwargs: model)
        if not hasattr(MegatronOptimizer, "grad_norms_by_group"):
            # NeMo-RL 0.7 reads grad_norms_by_group; megatron-core has it from 0.19 on.
            patch.setattr(MegatronOptimizer, "grad_norms_by_group", {}, raising=False)
        for module in (initialize, datasets):
            if hasattr(module, "compile_helpers"):
                patch.setattr(module, "compile_helpers", lambda *args, **kwargs: None)
        for module in setups:
            if hasattr(module, "initialize_megatron"):
                patch.setattr(module, "initialize_megatron", _with_cuda(initialize))
            for name in _OTHER_SIGNATURES:
                _replace(patch, module, name, _fitting)
            _replace(patch, module, "get_forward_backward_func", _fitting_schedule)
        try:
            yield
        finally:
            # NeMo-RL's worker never destroys Megatron's parallel state, because the process ends.
            parallel_state.destroy_model_parallel()
            num_microbatches_calculator.destroy_num_microbatches_calculator()
            rerun_state_machine.destroy_rerun_state_machine()


_OTHER_SIGNATURES = (
    "get_model",
    "logical_and_across_model_parallel_group",
    "reduce_max_stat_across_model_parallel_group",
    "_update_model_config_funcs",
)
"""Functions whose keywords differ between Bridge's release and the commit that NeMo-RL pins."""


def _replace(patch: pytest.MonkeyPatch, module: Any, name: str, make: Any) -> None:
    """Replace a function in the module that imports it and in the module that defines it.

    A worker class that Ray pickles by value takes its functions from the module that defines them.
    """
    function = getattr(module, name, None)
    if function is None:
        return
    made = make(function)
    for owner in (module, sys.modules[function.__module__]):
        if vars(owner).get(name) is function:
            patch.setattr(owner, name, made)


def _fitting_schedule(choose: Any) -> Any:
    @functools.wraps(choose)
    def fitting(*args: Any, **kwargs: Any) -> Any:
        return _fitting(choose(*args, **kwargs))

    return fitting


def _fitting(function: Any) -> Any:
    """Call a function without keywords that it lacks, and with process groups that it requires."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def fitting(*args: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection

        given = {key: kwargs[key] for key in kwargs if key in known}
        bound = inspect.signature(function).bind_partial(*args, **given).arguments
        for name, group in (
            ("pg_collection", ProcessGroupCollection.use_mpu_process_groups),
            ("mp_group", parallel_state.get_model_parallel_group),
        ):
            needed = name in known and known[name].default is inspect.Parameter.empty
            if needed and name not in bound:
                given[name] = group()
        return function(*args, **given)

    return fitting


def _with_cuda(initialize: Any) -> Any:
    """Bridge's ``initialize_megatron``, which runs as if a GPU were available."""

    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            return initialize.initialize_megatron(*args, **kwargs)

    return initialize_megatron


@contextlib.contextmanager
def harness(folder: Path) -> Iterator[None]:
    """Replace all GPU functions that a Megatron worker calls; ``folder``: the converted model."""
    from precision_shim_tools.testing.megatron_cpu import megatron_on_cpu

    with megatron_on_cpu(), nemo_rl_on_cpu(), on_cpu(folder):
        yield


_kept: list[contextlib.AbstractContextManager[None]] = []


def stay_on_cpu() -> None:
    """Enter ``harness`` for this Ray worker process; an environment variable names the folder."""
    import_worker_modules()
    _kept.append(harness(Path(os.environ["NEMO_RL_TEST_CONVERTED"])))
    _kept[-1].__enter__()
    here = torch.cuda.set_device

    def set_device(*args: Any) -> None:
        here(*args)
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            _kept.append(cuda_means_cpu())
            _kept[-1].__enter__()

    # From 0.7 on the worker is an asyncio actor, whose methods do not run on the thread of this
    # hook. torch.cuda.set_device is the first function of CUDA that the worker's __init__ calls.
    threads = {threading.get_ident()}
    torch.cuda.set_device = set_device


def convert(config: dict[str, Any], folder: Path) -> None:
    """Write the files of NeMo-RL's conversion of a Hugging Face model, without the weights.

    Megatron's own layers, which run on a CPU, keep their initial weights.
    """
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.bridge.training import config as bridge

    provider = AutoBridge.from_hf_pretrained(config["model_name"]).to_megatron_provider(
        load_weights=False
    )
    for name, value in CPU_TRANSFORMER.items():
        setattr(provider, name, value)
    provider.transformer_layer_spec = local_layer_spec
    provider.vocab_size = VOCABULARY
    name = config["model_name"]
    target = folder / f"model_{name.replace('/', '_')}" / "iter_0000000"
    target.mkdir(parents=True)
    bridge.ConfigContainer(
        model=provider,
        train=bridge.TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=1),
        optimizer=bridge.OptimizerConfig(lr=1e-3),
        ddp=bridge.DistributedDataParallelConfig(),
        scheduler=bridge.SchedulerConfig(),
        dataset=None,
        logger=bridge.LoggerConfig(),
        tokenizer=bridge.TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=name
        ),
        checkpoint=bridge.CheckpointConfig(),
    ).to_yaml(str(target / "run_config.yaml"))
    # Some versions of Bridge write exit_signal and keys ending in _steps, but cannot read them.
    written = yaml.safe_load((target / "run_config.yaml").read_text())
    written["train"].pop("exit_signal", None)
    scheduler = written["scheduler"]
    written["scheduler"] = {key: scheduler[key] for key in scheduler if not key.endswith("_steps")}
    (target / "run_config.yaml").write_text(yaml.safe_dump(written))


def plain(target: str) -> Any:
    """The class of the Ray actor that ``target`` names, with the shim on or off."""
    module, _, name = target.partition(":")
    actor_class = getattr(importlib.import_module(module), name)
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__


def arguments(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The arguments that NeMo-RL's worker group passes to a worker besides its config."""
    from nemo_rl.distributed.named_sharding import NamedSharding
    from transformers import AutoTokenizer

    layout = np.arange(1).reshape(1, 1, 1, 1)
    names = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
    return {
        "tokenizer": AutoTokenizer.from_pretrained(config["model_name"]),
        "worker_sharding_annotations": NamedSharding(layout=layout, names=names),
        "init_reference_model": False,
        "pre_init_communication_queue": None,
        **options,
    }


def worker(config: dict[str, Any], target: str = POLICY, **options: Any) -> Any:
    """Make a real worker in this process."""
    return plain(target)(config, **arguments(config, **options))
