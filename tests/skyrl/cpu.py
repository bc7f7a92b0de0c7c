"""SkyRL's workers on a CPU: stand-ins for packages that SkyRL imports, and for its GPU.

* :func:`flash_attn_placeholder` writes an empty package ``flash_attn``, because SkyRL imports
  ``pad_input`` and ``unpad_input`` at module level. The version is 0, so that transformers
  correctly treats flash attention as not installed.
* :func:`import_megatron` imports Megatron-Bridge for SkyRL's Megatron workers, with stand-ins for
  packages that SkyRL 0.4 imports and that a CPU machine cannot install.
* :func:`skyrl_on_cpu` makes the device ``"cuda"`` in SkyRL's workers mean the CPU. In addition to
  :func:`~precision_shim_tools.testing.megatron_cpu.cuda_means_cpu`, it puts device meshes and
  autocasts of SkyRL on the CPU.
* :func:`stay_on_cpu` enters ``skyrl_on_cpu`` in the processes of a Ray cluster, whose workers meet
  over gloo.
* :func:`make_worker` makes a worker object in this process, without a Ray actor.

Three features have no stand-in: packing of sequences without padding (needs flash attention; leave
``use_sample_packing`` or ``remove_microbatch_padding`` off), inference engines, weight sync.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import socket
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

from precision_shim.process.finders import Watcher
from precision_shim_tools.testing.megatron_cpu import _CudaMeansCpu, _patch, cuda_means_cpu

from ..stand_ins.megatron_bridge import import_megatron_bridge

__all__ = [
    "flash_attn_placeholder",
    "import_megatron",
    "make_worker",
    "skyrl_on_cpu",
    "stay_on_cpu",
]

_PADDING = '''"""Placeholders; a CPU has no flash attention."""


def pad_input(*args, **kwargs):
    raise RuntimeError("flash_attn is a placeholder here: leave packing of sequences off")


unpad_input = pad_input
'''

_MEGATRON_WORKER = "skyrl.backends.skyrl_train.workers.megatron.megatron_worker"
_METADATA = "Metadata-Version: 2.1\nName: flash-attn\nVersion: 0\n"


def flash_attn_placeholder(folder: Path) -> Path:
    """Write a placeholder for ``flash_attn``; the caller puts ``folder`` on ``sys.path``.

    Other processes find the placeholder through ``PYTHONPATH``. Call this function before the first
    import of transformers, which then reads the installed packages.

    Args:
        folder: an existing folder.

    Returns:
        The folder.
    """
    files = {
        "flash_attn/__init__.py": '__version__ = "0"\n',
        "flash_attn/bert_padding.py": _PADDING,
        "flash_attn-0.dist-info/METADATA": _METADATA,
        "flash_attn-0.dist-info/RECORD": "",
        "flash_attn-0.dist-info/top_level.txt": "flash_attn\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def import_megatron() -> None:
    """Import the packages of SkyRL's Megatron workers, before the workers are imported.

    Raises:
        ImportError: skyrl, megatron-core or Megatron-Bridge is not installed.
    """
    import_megatron_bridge()
    if Version(version("skyrl")) >= Version("0.4"):
        # Megatron's module must not find the stand-in for nvidia_resiliency_ext, so the import of
        # Megatron's module comes first.
        importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
        _stand_in_resiliency()
        _stand_in_adapter_sync()


class AsyncCallsQueue:
    """A queue of asynchronous checkpoint writes; in this stand-in each write is synchronous."""

    def __init__(self, *, persistent: bool) -> None: ...

    def close(self) -> None:
        """Does nothing, because there is no writer process."""

    def maybe_finalize_async_calls(self, *, blocking: bool) -> None:
        """Does nothing, because no write is ever pending."""


def _stand_in_resiliency() -> None:
    """Add a module ``nvidia_resiliency_ext``, whose ``AsyncCallsQueue`` SkyRL 0.4 uses.

    megatron-core needs its release 0.6, whose wheels need a newer glibc than most images have.
    """
    if importlib.util.find_spec("nvidia_resiliency_ext") is not None:
        return
    name = ""
    for part in ("nvidia_resiliency_ext", "checkpointing", "async_ckpt", "core"):
        name = f"{name}.{part}".lstrip(".")
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    module.AsyncCallsQueue = AsyncCallsQueue  # type: ignore[attr-defined]


def _stand_in_adapter_sync() -> None:
    """Add two functions for experts' LoRA adapters that Megatron-Bridge 0.6.2 lacks."""
    from megatron.bridge.peft import utils
    from megatron.core.distributed import finalize_model_grads

    own = {
        "enable_expert_parallel_grad_sync_in_finalize": lambda model: None,
        "finalize_model_grads_with_expert_adapter_sync": finalize_model_grads,
    }
    for name, function in own.items():
        if not hasattr(utils, name):
            setattr(utils, name, function)


@contextmanager
def skyrl_on_cpu() -> Iterator[None]:
    """Let SkyRL's FSDP workers run on a CPU; undone on exit.

    Raises:
        ImportError: skyrl is not installed.
    """
    from skyrl.backends.skyrl_train.distributed import fsdp_utils
    from torch.distributed import device_mesh

    autocast, mesh = torch.autocast, device_mesh.init_device_mesh

    class Autocast(autocast):  # type: ignore[misc, valid-type]
        """``torch.autocast``, in which ``"cuda"`` is another name of the CPU."""

        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return mesh("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    meshes = {"init_device_mesh": init_device_mesh}
    with (
        cuda_means_cpu(),
        _patch(torch, {"autocast": Autocast}),
        _patch(device_mesh, meshes),
        _patch(fsdp_utils, meshes),
    ):
        yield


def stay_on_cpu() -> None:
    """Enter ``skyrl_on_cpu`` in this thread and in threads started later, and never leave it.

    Ray calls this function as a setup hook. An actor's methods run in another thread, and device
    names are replaced for each thread separately.
    """
    make_group = dist.init_process_group

    def init_process_group(*args: Any, backend: str | None = None, **kwargs: Any) -> None:
        make_group(*args, backend="gloo", **kwargs)

    dist.init_process_group = init_process_group
    Watcher(lambda name: import_megatron(), before=True).watch([_MEGATRON_WORKER])
    stack = ExitStack()
    stack.enter_context(skyrl_on_cpu())
    _kept.append(stack)
    run = threading.Thread.run

    def run_on_cpu(self: threading.Thread) -> None:
        with _CudaMeansCpu():
            run(self)

    threading.Thread.run = run_on_cpu  # type: ignore[method-assign]


_kept: list[ExitStack] = []


def make_worker(kind: type[Any], cfg: Any, *, rank: int = 0, world_size: int = 1) -> Any:
    """Make a SkyRL worker object in this process, through the worker's own constructor.

    Args:
        kind: the plain class, such as ``FSDPPolicyWorkerBase``.
        cfg: the ``trainer`` part of SkyRL's config.
        rank: the rank of this process.
        world_size: number of processes.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
    before = {name: os.environ.get(name) for name in names}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    from skyrl.backends.skyrl_train.workers import worker as module

    # SkyRL's function redirects the logging of the whole process, which is right in an actor only.
    logging = {"configure_ray_worker_logging": lambda: None}
    try:
        with _patch(module, logging):
            return kind(
                cfg=cfg,
                world_size=world_size,
                rank=rank,
                local_rank=rank,
                master_addr="127.0.0.1",
                master_port=port,
                sequence_parallel_size=1,
            )
    finally:  # the process group that the constructor made no longer needs the variables
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
