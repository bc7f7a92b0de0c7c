"""Fixtures for the tests of precision_shim.testing."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


def _has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@pytest.fixture(scope="session")
def megatron_core() -> Any:
    if not _has("megatron.core"):
        pytest.skip("megatron-core is not installed")
    with warnings.catch_warnings():
        # Megatron warns about TransformerEngine and Apex, which are absent on purpose.
        warnings.simplefilter("ignore")
        import megatron.core
        import megatron.core.models.gpt
        import megatron.core.optimizer
    return megatron.core


@pytest.fixture
def one_process(megatron_core: Any) -> Iterator[Any]:
    """The stand-in, the harness, and a process group of one rank."""
    from precision_shim_tools.testing import (
        megatron_on_cpu,
        model_parallel,
        stand_in_transformer_engine,
    )

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with stand_in_transformer_engine() as stand_in, megatron_on_cpu(), model_parallel():
            yield stand_in
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def snapshot() -> Callable[[], dict[str, Any]]:
    """The namespaces that the context managers change, to compare before and after."""

    def take() -> dict[str, Any]:
        import sys

        state: dict[str, Any] = {
            "torch.cuda": dict(vars(torch.cuda)),
            "torch.cuda.nvtx": dict(vars(torch.cuda.nvtx)),
            "meta_path": list(sys.meta_path),
            "te": {
                name: m for name, m in sys.modules.items() if name.startswith("transformer_eng")
            },
        }
        for name in (
            "megatron.core.optimizer",
            "megatron.core.optimizer.distrib_optimizer",
            "megatron.core.utils",
        ):
            if name in sys.modules:
                state[name] = dict(vars(sys.modules[name]))
        if "megatron.core.tensor_parallel.random" in sys.modules:
            tracker = sys.modules["megatron.core.tensor_parallel.random"].CudaRNGStatesTracker
            state["tracker"] = dict(vars(tracker))
        return state

    return take
