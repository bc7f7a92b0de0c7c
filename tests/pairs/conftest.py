"""Two servers, whose forks run the jobs of all pairs; see ``test_pairs.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
from packaging.version import Version

from ..processes.rank_server import Ranks, rank_server

try:
    VERL = Version(version("verl"))
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]
    VERL = Version("0")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that replace the tests' own pairs."""
    parser.addoption("--pair", action="append", default=[], help="run this pair, given as its text")
    parser.addoption(
        "--drawn", default="", metavar="SEED:COUNT", help="run so many pairs, drawn by this seed"
    )


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ranks]]:
    """Returns a backend's server, which starts at the first call."""
    servers: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:

        def server(backend: str) -> Ranks:
            if backend not in servers:
                folder = tmp_path_factory.mktemp(backend)
                servers[backend] = stack.enter_context(
                    rank_server(f"tests.pairs.{backend}", folder, MODEL=str(folder / "model"))
                )
            return servers[backend]

        yield server


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """With ``--pair`` or ``--drawn`` list each pair and its end."""
    if not (config.getoption("--pair", None) or config.getoption("--drawn", None)):
        return
    reports = (one for found in terminalreporter.stats.values() for one in found)
    said = {value for one in reports for _, value in getattr(one, "user_properties", ())}
    for line in sorted(said):
        terminalreporter.write_line(line)
