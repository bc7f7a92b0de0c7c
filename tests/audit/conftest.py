"""Fixtures of the audit's tests; Megatron runs on a CPU as in ``tests/testing``."""

from __future__ import annotations

from ..processes.rank_server import serving
from ..testing.conftest import megatron_core, one_process

__all__ = ["megatron_core", "one_process", "run_ranks"]

run_ranks = serving("tests.audit.ranks")
