"""Fixtures for the tests of the plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..processes.rank_server import Ranks, rank_server


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with rank_server("tests.plan.ranks", tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks
