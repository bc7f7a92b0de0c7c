"""Fixtures for Megatron on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from ..testing.conftest import megatron_core, one_process

__all__ = ["megatron_core", "one_process"]


@pytest.fixture
def framework(one_process: Any) -> str:
    return "megatron"
