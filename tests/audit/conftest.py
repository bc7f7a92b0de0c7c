"""Fixtures of the audit's tests; Megatron runs on a CPU as in ``tests/testing``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..processes.rank_server import Ranks, rank_server
from ..testing.conftest import megatron_core, one_process

__all__ = ["megatron_core", "one_process"]


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with rank_server("tests.audit.ranks", tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks
