"""Fixtures: ms-swift on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from ..testing.conftest import megatron_core, one_process
from .cpu import import_trainer, on_cpu

__all__ = ["megatron_core", "on_cpu", "one_process"]


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """Import ms-swift before any stand-in for TransformerEngine exists."""
    import_trainer()


@pytest.fixture
def framework(on_cpu: Any) -> str:
    return "ms-swift"
