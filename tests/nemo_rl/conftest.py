"""Fixtures with the real NeMo-RL on a CPU.

Only fixtures import the framework, so that pytest collects the tests quickly and a warning that the
framework raises at import does not fail the collection.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ..every_framework.upstreams_own import fetch
from ..processes.rank_server import freeze, serving
from ..stand_ins.tiny_models import make_checkpoint
from .cpu import nemo_rl_on_cpu
from .support import NEMO_RL, actor_class, make_worker, policy_config

if Version("0") == NEMO_RL:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny causal language model."""
    return make_checkpoint(tmp_path_factory.mktemp("model"))


ranks = serving("tests.nemo_rl.ranks")


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NeMo-RL's checkout at the installed commit, from uv's cache or from GitHub."""
    commit = json.loads(distribution("nemo-rl").read_text("direct_url.json") or "{}")
    commit = commit.get("vcs_info", {}).get("commit_id", "none")
    cache = os.environ.get("UV_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "uv"
    )
    for found in Path(cache).glob("git-v*/checkouts/*/*"):
        if commit.startswith(found.name) and (found / "examples" / "configs").is_dir():
            return found
    url = "https://github.com/NVIDIA-NeMo/RL"
    return fetch(tmp_path_factory.mktemp("RL"), url, (commit,), "examples")


_freeze = functools.cache(lambda kind: freeze())  # each kind of worker imports more


@pytest.fixture
def worker(model: Path) -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """Makes a worker in this process for a with block; destroys its process group at the end."""

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
            _freeze(kind)
            made = make_worker(kind, policy_config(model, precision, kind, **changes), **given)
            yield made  # this frame refers to it, and so its audit stays

    return make
