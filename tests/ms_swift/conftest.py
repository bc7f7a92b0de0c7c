"""Fixtures: ms-swift on a CPU, and ``install()`` for ms-swift."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import precision_shim

from ..testing.conftest import megatron_core, one_process
from .cpu import import_trainer, on_cpu

__all__ = ["megatron_core", "on_cpu", "one_process"]


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """Import ms-swift before any stand-in for TransformerEngine exists."""
    import_trainer()


@pytest.fixture
def on(shim: Callable[..., Any], on_cpu: Any) -> Callable[..., precision_shim.Status]:
    """``install()`` for ms-swift, strict."""

    def install(frameworks: str = "ms-swift", **settings: Any) -> precision_shim.Status:
        status: precision_shim.Status = shim(
            frameworks=frameworks, settings=settings, strict=True, export=False
        )
        return status

    return install
