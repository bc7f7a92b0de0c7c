"""Fixtures for ROLL on a CPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings

import pytest

from ..testing.conftest import megatron_core, one_process
from .driving import stand_in_for_absent

__all__ = ["megatron_core", "one_process"]


@pytest.fixture(scope="session", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import ROLL's strategies once, in a temporary folder, because the import writes a log."""
    if importlib.util.find_spec("roll") is None:
        pytest.skip("ROLL is not installed in this environment")
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("roll"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stand_in_for_absent()
            for one in ("megatron_strategy", "fsdp2_strategy"):
                importlib.import_module(f"roll.distributed.strategy.{one}")
    finally:
        os.chdir(before)


@pytest.fixture
def framework() -> str:
    return "roll"
