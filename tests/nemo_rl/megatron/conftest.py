"""NeMo-RL's real Megatron workers on real Megatron-core and Megatron-Bridge, on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from . import support

TRANSFORMER_ENGINE = "2.11.0"


@pytest.fixture(autouse=True)
def no_attention_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron leaves one model's attention backend in the environment, and trips on the next."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def megatron() -> None:
    """NeMo-RL's Megatron worker module is imported, and Megatron-Bridge with it."""
    try:
        version("megatron-bridge")
    except PackageNotFoundError:
        pytest.skip("megatron-bridge is not installed; tests/environments has it")
    support.import_worker_modules()


@pytest.fixture
def fused_adam(megatron: None) -> Iterator[str]:
    """TransformerEngine's FusedAdam, by its stand-in; yields the version it tells."""
    from precision_shim.testing.transformer_engine import stand_in_transformer_engine

    with stand_in_transformer_engine(TRANSFORMER_ENGINE) as stand_in:
        yield stand_in.version


@pytest.fixture
def worker(
    megatron: None, model: Path, tmp_path: Path
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
        folder = tmp_path / "converted"
        with support.harness(folder):
            if not folder.exists():
                support.convert(settings, folder)
            given = dict(options or {})
            if target == support.POLICY:
                given["init_reference_model"] = reference
            yield support.worker(settings, target, **given)

    return make
