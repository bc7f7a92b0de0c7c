"""Lets SGLang's CPU engine run without SGLang's compiled kernels, which PyPI lacks for CPUs.

SGLang's own Python code is real: server, tokenizer manager, scheduler, model and loader.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import multiprocessing
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "enable_memory_saver": False,  # needs a library for GPUs
    "max_total_tokens": 256,
    "skip_tokenizer_init": True,
}
"""SGLang's own arguments for a CPU, which a user writes under ``engine_kwargs``."""


class _Kernel:
    """Stands in for a compiled function of ``sgl_kernel``; on a CPU SGLang calls none."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is compiled for GPUs")


class _Kernels(ModuleType):
    """Stands in for ``sgl_kernel`` and its modules."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Kernels(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def use_cpu() -> None:
    """Let SGLang run on a CPU in this process and its forks; call it before SGLang is imported.

    SGLang would start its scheduler by ``spawn``, and import everything again for half a minute.
    """
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    sys.meta_path.insert(0, _Finder())
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None
