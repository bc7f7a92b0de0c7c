"""Fixtures with the real SkyRL, megatron-core and Megatron-Bridge on a CPU.

Only fixtures import the frameworks, so that pytest collects the tests quickly and a warning that a
framework raises at import does not fail the collection.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.version import Version

from ..processes.rank_server import Ranks, freeze, rank_server
from ..stand_ins.tiny_models import make_checkpoint
from .cpu import flash_attn_placeholder, import_megatron, skyrl_on_cpu
from .support import python_path

try:
    SKYRL = Version(version("skyrl"))
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]
    SKYRL = Version("0")


def pytest_configure(config: pytest.Config) -> None:
    """Put the flash_attn placeholder on sys.path before transformers reads what is installed."""
    if Version("0") == SKYRL or "transformers" in sys.modules:
        return
    folder = tempfile.TemporaryDirectory(prefix="flash_attn")
    config.add_cleanup(folder.cleanup)
    sys.path.insert(0, str(flash_attn_placeholder(Path(folder.name))))


@pytest.fixture(scope="session")
def skyrl() -> None:
    """Import SkyRL, Megatron-Bridge and megatron-core without the shim."""
    import_megatron()
    import skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker
    import skyrl.backends.skyrl_train.workers.megatron.megatron_worker  # noqa: F401

    freeze()


@pytest.fixture(scope="session")
def cpu(skyrl: None) -> Iterator[None]:
    """One process on a CPU, with Megatron's parallel state."""
    from precision_shim_tools.testing.megatron_cpu import megatron_on_cpu, model_parallel

    with megatron_on_cpu(), skyrl_on_cpu(), model_parallel():
        yield


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Starts rank processes that have imported the slowest modules."""
    folder = tmp_path_factory.mktemp("ranks")
    with rank_server("tests.skyrl.server", folder, PYTHONPATH=python_path()) as server:
        yield server


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same tiny model in each dtype, by the dtype's name."""
    return {
        name: make_checkpoint(tmp_path_factory.mktemp(name), name)
        for name in ("bfloat16", "float16", "float32")
    }
