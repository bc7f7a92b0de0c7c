"""Fixtures with the real torchtitan on a CPU.

Only fixtures import the framework, so that pytest collects the tests quickly and a warning that the
framework raises at import does not fail the collection.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ..processes.rank_server import serving

try:
    TORCHTITAN = version("torchtitan")
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]
    TORCHTITAN = ""
TORCH_HAS_PIPELINES = Version("2.15") <= Version(version("torch")) if TORCHTITAN else False
"""torchtitan 0.3.0 calls a pipeline's schedule with the signature that torch has from 2.15 on."""


@pytest.fixture(scope="session")
def torchtitan() -> None:
    """Import torchtitan without the shim, in a process group of one."""
    from . import cpu

    cpu.enter()


@pytest.fixture
def policy(torchtitan: None, tmp_path: Path) -> Callable[..., Any]:
    """Build a real ``PolicyTrainer``; see ``cpu.policy_trainer``."""
    from . import cpu

    def build(dtype: str = "float16", folder: Path = tmp_path, **changes: Any) -> Any:
        return cpu.policy_trainer(folder, dtype, **changes)

    return build


@pytest.fixture
def pretrainer(torchtitan: None, tmp_path: Path) -> Callable[..., Any]:
    """Build a real ``Trainer``; see ``cpu.pretrainer``."""
    from . import cpu

    def build(dtype: str = "float16", folder: Path = tmp_path, **changes: Any) -> Any:
        return cpu.pretrainer(folder, dtype, **changes)

    return build


ranks = serving("tests.torchtitan.ranks")
