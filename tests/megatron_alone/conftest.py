"""Fixtures for Megatron on a CPU, and ``install()`` with the framework name ``megatron`` alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import precision_shim

from ..testing.conftest import megatron_core, one_process

__all__ = ["megatron_core", "one_process"]


@pytest.fixture
def on(shim: Callable[..., Any], one_process: Any) -> Callable[..., Any]:
    """``install()`` for any job on Megatron-core."""

    def install(
        frameworks: str = "megatron", features: str | None = None, **settings: Any
    ) -> precision_shim.Status:
        status: precision_shim.Status = shim(
            frameworks=frameworks, features=features, settings=settings, strict=True, export=False
        )
        return status

    return install
