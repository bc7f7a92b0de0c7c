"""The real NeMo-RL on a CPU.

Everything of the framework is imported inside fixtures: collecting must stay cheap, and what the
framework warns about at import is its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ..rank_server import Ranks, rank_server
from ..tiny_models import make_checkpoint
from .cpu import nemo_rl_on_cpu
from .support import NEMO_RL, actor_class, make_worker, policy_config

if Version("0") == NEMO_RL:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny causal language model."""
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Starts processes that have imported what takes longest; returns what each found, by rank."""
    with rank_server("tests.nemo_rl.ranks", tmp_path_factory.mktemp("ranks")) as server:
        yield server


@functools.cache
def look_at_imports_no_more(kind: str) -> None:
    """The workers collect garbage around each step, two million objects of which are imports."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def worker(model: Path) -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """Makes a worker for a with block: one process, and its process group gone at the end."""

    @contextlib.contextmanager
    def make(kind: str, precision: str, paths: Path | None = None, **changes: Any) -> Iterator[Any]:
        given = {}
        if paths is not None:
            given = {
                "weights_path": str(paths / "weights"),
                "optimizer_path": str(paths / "optimizer"),
            }
        with nemo_rl_on_cpu():
            actor_class(kind)
            look_at_imports_no_more(kind)
            yield make_worker(kind, policy_config(model, precision, kind, **changes), **given)

    return make
