"""Real NeMo-RL DTensor workers on a CPU, in this process, in several, or in Ray actors.

NeMo-RL's workers name NCCL, ``"cuda"`` meshes, ``"cuda"`` autocast and Ray's GPUs, but use few of
their functions. This module replaces NeMo-RL's GPU calls by CPU calls. The real worker classes
then load a tiny model, train, save, resume over gloo. Works with NeMo-RL 0.4.0 to 0.7.0 (2026-11).

* :func:`nemo_rl_on_cpu` is the harness for a process that makes a worker itself.
* :func:`stay_on_cpu` is the harness for the processes of a Ray cluster: it takes effect when
  ``nemo_rl`` is imported, and is never undone. ``sitecustomize.py`` on ``PYTHONPATH`` calls it.

The harness shows nothing about CUDA kernels, their rounding, NCCL, or speed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from precision_shim.process.finders import Watcher
from precision_shim_tools.testing.megatron_cpu import environment

__all__ = ["config_modules_pickle", "nemo_rl_on_cpu", "stay_on_cpu"]

_PATCHES = "nemo_rl.models.policy.workers.patches"
_V1 = (
    "nemo_rl.models.policy.dtensor_policy_worker",
    "nemo_rl.models.policy.workers.dtensor_policy_worker",
)
_AUTO_MODEL = "nemo_automodel.components._transformers.auto_model"
_VLLM = "nemo_rl.models.generation.vllm"
_V2 = "nemo_rl.models.policy.workers.dtensor_policy_worker_v2"
_WATCHED = (_PATCHES, *_V1, _V2, _AUTO_MODEL, f"{_VLLM}.patches", f"{_VLLM}.vllm_worker")


@contextlib.contextmanager
def nemo_rl_on_cpu(
    world_size: int = 1, rank: int = 0, init_file: str | None = None
) -> Iterator[None]:
    """Replace what a NeMo-RL DTensor worker needs from a GPU in this process; undone on exit.

    If a worker in the block makes a process group, the harness destroys that group on exit.

    Args:
        world_size: number of processes.
        rank: the rank of this process.
        init_file: path of the rendezvous file, which must not exist yet; None if one process.

    Raises:
        ValueError: ``world_size`` is above 1 and ``init_file`` is None.
    """
    if world_size > 1 and init_file is None:
        raise ValueError("several processes need an init_file to meet at")
    import torch.distributed as dist

    with contextlib.ExitStack() as stack:
        if init_file is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            init_file = os.path.join(folder, "rendezvous")
        numbers = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": world_size}
        stack.enter_context(environment({name: str(n) for name, n in numbers.items()}))
        _answer_for_gpus(stack, f"file://{init_file}")
        watcher = Watcher(_module_is_there)
        watcher.watch(_WATCHED)
        stack.callback(watcher.remove)
        for name in _WATCHED:
            if name in sys.modules:
                _module_is_there(name)
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def stay_on_cpu() -> None:
    """Enter the harness when ``nemo_rl`` is imported, and never leave it.

    The processes meet at the address that Ray's worker group wrote into the environment. CUDA's
    names are replaced in the thread that imports ``nemo_rl``, which is an actor's main thread.
    """
    watcher = Watcher(lambda name: _stay() if name == "nemo_rl" else _module_is_there(name))
    watcher.watch(["nemo_rl", *_WATCHED])


_kept: list[contextlib.ExitStack] = []


def _stay() -> None:
    stack = contextlib.ExitStack()
    _answer_for_gpus(stack, None)
    _kept.append(stack)


def _answer_for_gpus(stack: contextlib.ExitStack, init_method: str | None) -> None:
    import ray
    import torch
    import torch.distributed as dist
    import torch.distributed.device_mesh as meshes
    from torch.amp import autocast_mode

    from precision_shim_tools.testing.megatron_cpu import _patch, cuda_means_cpu

    stack.enter_context(config_modules_pickle())
    make_group, make_mesh = dist.init_process_group, meshes.init_device_mesh
    swap: Any = torch.utils.swap_tensors
    enter_autocast = autocast_mode.autocast.__init__

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        kwargs.pop("backend", None)
        if init_method is not None:
            numbers = {name: int(os.environ[name.upper()]) for name in ("rank", "world_size")}
            kwargs |= {"init_method": init_method, **numbers}
        make_group("gloo", **kwargs)

    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return make_mesh("cpu", *args, **kwargs)

    def autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        enter_autocast(self, "cpu", *args, **kwargs)

    def swap_tensors(one: Any, other: Any) -> None:
        # If both are one CPU tensor, torch refuses the swap, because it counts two owners.
        if one is not other:
            swap(one, other)

    stack.enter_context(cuda_means_cpu())
    for owner, values in (
        (dist, {"init_process_group": init_process_group, "init_device_mesh": init_device_mesh}),
        (meshes, {"init_device_mesh": init_device_mesh}),
        (autocast_mode.autocast, {"__init__": autocast}),
        (ray, {"get_gpu_ids": _one_gpu}),
        (torch.utils, {"swap_tensors": swap_tensors}),
        (
            torch.cuda,
            {
                "get_device_name": _name_of_device,
                "memory_allocated": _no_memory,
                "memory_reserved": _no_memory,
            },
        ),
    ):
        stack.enter_context(_patch(owner, values))


def _one_gpu() -> list[int]:
    return [0]


def _name_of_device(*args: Any) -> str:
    return "cpu"


def _no_memory(*args: Any) -> int:
    return 0


def _module_is_there(name: str) -> None:
    module = sys.modules[name]
    replacements: dict[str, Callable[..., Any]] = {
        # NeMo-RL's patch supports and asserts a single version of torch.
        "apply_torch_aten_alias_tensor_patch": _nothing,
        # NeMo-RL's function changes vLLM's files, and vLLM is not installed.
        "_apply_vllm_patches": _nothing,
    }
    if name in _V1:
        # The environment that NeMo-RL makes for its first DTensor worker lacks nemo_automodel.
        replacements["resolve_model_class"] = _plain_model_class
    for attribute, value in replacements.items():
        if hasattr(module, attribute):
            setattr(module, attribute, value)
    if name == _AUTO_MODEL:
        # nemo_automodel 0.1 loads models with flash attention by default, which needs a GPU.
        # NeMo-RL 0.4 overrides nemo_automodel's default in only one of two calls.
        loader = module._BaseNeMoAutoModelClass.from_pretrained.__func__
        loader.__kwdefaults__["attn_implementation"] = "sdpa"


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces NeMo-RL's patches of vLLM and of a torch version that is not installed."""


def _plain_model_class(model_name: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


@contextlib.contextmanager
def config_modules_pickle() -> Iterator[None]:
    """Let torch's config modules be pickled by their names; undone on exit.

    Torch 2.13 refuses to pickle its config modules. But NeMo-RL 0.4 to 0.6, made for older torch,
    send actor classes to Ray that contain a config module by value.
    """
    from torch.utils._config_module import ConfigModule

    from precision_shim_tools.testing.megatron_cpu import _patch

    with _patch(ConfigModule, {"__reduce_ex__": _config_module_by_name}):
        yield


def _config_module_by_name(module: Any, protocol: Any) -> Any:
    import importlib

    return importlib.import_module, (module.__name__,)
