"""NeMo-RL's real Megatron workers on real Megatron-core and Megatron-Bridge, on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from ...processes.rank_server import freeze
from . import support


@pytest.fixture(scope="session")
def cpu() -> None:
    """Imports NeMo-RL's Megatron worker module and Megatron-Bridge, or skips the test."""
    try:
        version("megatron-bridge")
    except PackageNotFoundError:
        pytest.skip("megatron-bridge is not installed; tests/environments has it")
    support.import_worker_modules()
    freeze()


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model's conversion, which the first worker writes and all read."""
    return tmp_path_factory.mktemp("conversion") / "converted"


@pytest.fixture
def worker(
    cpu: None, model: Path, converted: Path
) -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """Makes a worker for a with block; the arguments are those of ``policy_config``."""

    @contextlib.contextmanager
    def make(
        precision: str = "bfloat16",
        *,
        target: str = support.POLICY,
        reference: bool = False,
        options: dict[str, Any] | None = None,
        **config: Any,
    ) -> Iterator[Any]:
        settings = support.policy_config(model, precision, **config)
        with support.harness(converted):
            if not converted.exists():
                support.convert(settings, converted)
            given = dict(options or {})
            if target == support.POLICY:
                given["init_reference_model"] = reference
            yield support.worker(settings, target, **given)

    return make
