"""Fixtures for Megatron on a CPU."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from typing import Any
from unittest import mock

import pytest

from ..testing.conftest import megatron_core, one_process

__all__ = ["megatron_core", "one_process"]

SGLANG = ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.openai")
SGLANG += ("sglang.srt.entrypoints.openai.protocol", "sglang.srt.debug_utils")
SGLANG += ("sglang.srt.debug_utils.dumper",)


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(f"{name}.backends") is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="session")
def name() -> str:
    """The trainer (slime or miles) that is installed in this environment."""
    for one in ("slime", "miles"):
        if _found(one):
            return one
    pytest.skip("neither slime nor miles is installed in this environment")


@pytest.fixture(scope="session", autouse=True)
def imported(name: str) -> None:
    """Import the trainer's Megatron backend once, with a mock of SGLang, which miles imports."""
    if name == "miles":
        for one in SGLANG:
            module = types.ModuleType(one)
            module.__path__ = []
            module.__getattr__ = _mocked  # type: ignore[method-assign]
            sys.modules[one] = module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing TransformerEngine, Apex and DeepEP
        importlib.import_module(f"{name}.backends.megatron_utils.model")


def _mocked(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return mock.MagicMock(name=name)


@pytest.fixture
def framework(name: str) -> str:
    return name
