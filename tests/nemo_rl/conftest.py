"""The real NeMo-RL on a CPU.

Everything of the framework is imported inside fixtures: collecting must stay cheap, and what the
framework warns about at import is its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ..tiny_models import make_checkpoint
from .cpu import nemo_rl_on_cpu
from .support import NEMO_RL, make_worker, policy_config

if Version("0") == NEMO_RL:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny causal language model."""
    return make_checkpoint(tmp_path_factory.mktemp("model"))


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
            yield make_worker(kind, policy_config(model, precision, kind, **changes), **given)

    return make
