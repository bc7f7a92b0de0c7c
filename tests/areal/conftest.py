"""Fixtures for AReaL on a CPU, and ``install()`` for AReaL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import precision_shim

from ..testing.conftest import megatron_core, one_process
from .cpu import import_engine, on_cpu

__all__ = ["megatron_core", "on_cpu", "one_process"]


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """Import AReaL before any stand-in for TransformerEngine exists."""
    import_engine()


@pytest.fixture
def on(shim: Callable[..., Any], on_cpu: Any) -> Callable[..., precision_shim.Status]:
    """``install()`` for AReaL, strict."""

    def install(frameworks: str = "areal", **settings: Any) -> precision_shim.Status:
        status: precision_shim.Status = shim(
            frameworks=frameworks, settings=settings, strict=True, export=False
        )
        return status

    return install
