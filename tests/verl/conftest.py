"""Fixtures with the real verl and megatron-core on a CPU.

Only fixtures import the frameworks, so that pytest collects the tests quickly and a warning that a
framework raises at import does not fail the collection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.version import Version

from ..processes.rank_server import Ranks, freeze, rank_server, serving
from ..stand_ins.megatron_bridge import import_megatron_bridge
from ..stand_ins.tiny_models import make_checkpoint
from .support import local_layers

try:
    VERL = Version(version("verl"))
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]
    VERL = Version("0")


@pytest.fixture(scope="session")
def cpu() -> Iterator[None]:
    """Import verl and megatron-core in one process on a CPU, with Megatron's parallel state."""
    from precision_shim_tools.testing.megatron_cpu import megatron_on_cpu, model_parallel

    with contextlib.suppress(ModuleNotFoundError):  # not every environment has Megatron-Bridge
        import_megatron_bridge()
    import torch
    import verl.utils.megatron.optimizer
    import verl.utils.megatron_utils
    import verl.workers.engine.megatron.transformer_impl  # noqa: F401

    freeze()
    with megatron_on_cpu(), model_parallel(), local_layers(), pytest.MonkeyPatch.context() as patch:
        # verl calls the device's empty_cache, which a CPU does not have.
        patch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny causal language model."""
    return make_checkpoint(tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="session")
def value_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a value head, by which verl before 0.8 recognizes a critic."""
    return make_checkpoint(tmp_path_factory.mktemp("value"), value_head=True)


@pytest.fixture(scope="session")
def megatron_ranks(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Ranks]:
    """Starts ranks that train on Megatron; ``megatron_ranks.py`` has their cases."""
    folder = tmp_path_factory.mktemp("megatron-ranks")
    with rank_server("tests.verl.megatron_ranks", folder, CHECKPOINT=str(checkpoint)) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def fsdp_ranks(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, value_checkpoint: Path
) -> Iterator[Ranks]:
    """Starts ranks that train on FSDP; ``fsdp_ranks.py`` has their cases."""
    models = {"MODEL": str(checkpoint), "VALUE_MODEL": str(value_checkpoint)}
    folder = tmp_path_factory.mktemp("fsdp-ranks")
    with rank_server("tests.verl.fsdp_ranks", folder, **models) as ranks:
        yield ranks


ray_drivers = serving("tests.verl.ray_processes")


@pytest.fixture(scope="session")
def engine_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Starts ranks that train on verl's other engines; ``engine_ranks.py`` has their cases."""
    from .engine_support import make_model

    model = make_model(tmp_path_factory.mktemp("qwen3"))
    folder = tmp_path_factory.mktemp("engine-ranks")
    with rank_server("tests.verl.engine_ranks", folder, MODEL=str(model)) as ranks:
        yield ranks
