"""The real verl on the real megatron-core, on a CPU.

Everything of the frameworks is imported inside fixtures: collecting must stay cheap, and what the
frameworks warn about at import is theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.version import Version

import precision_shim

from .support import local_layers, make_checkpoint

try:
    VERL = Version(version("verl"))
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]
    VERL = Version("0")

TRANSFORMER_ENGINE = "2.11.0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other projects' warnings are theirs; ours are errors unless a test expects them."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)
            item.add_marker(
                pytest.mark.filterwarnings("error::precision_shim.errors.PrecisionShimWarning"),
            )


@pytest.fixture(autouse=True)
def no_attention_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron leaves one model's attention backend in the environment, and trips on the next."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def cpu() -> Iterator[None]:
    """One process on a CPU: Megatron's parallel state, and verl and megatron-core imported."""
    from precision_shim.testing.megatron_bridge import import_megatron_bridge
    from precision_shim.testing.megatron_cpu import megatron_on_cpu, model_parallel

    with contextlib.suppress(ModuleNotFoundError):  # not in every environment
        import_megatron_bridge()
    import torch
    import verl.utils.megatron.optimizer
    import verl.utils.megatron_utils
    import verl.workers.engine.megatron.transformer_impl  # noqa: F401

    with megatron_on_cpu(), model_parallel(), local_layers(), pytest.MonkeyPatch.context() as patch:
        # A CPU has no cache of freed memory to empty.
        patch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
        yield


@pytest.fixture
def fused_adam(cpu: None) -> Iterator[str]:
    """TransformerEngine's FusedAdam, by its stand-in; yields the version it tells."""
    from precision_shim.testing.transformer_engine import stand_in_transformer_engine

    with stand_in_transformer_engine(TRANSFORMER_ENGINE) as stand_in:
        yield stand_in.version


@pytest.fixture
def shim() -> Iterator[Callable[..., precision_shim.Status]]:
    """``install``, and the way back at the end of the test."""
    try:
        yield precision_shim.install
    finally:
        precision_shim.uninstall()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny causal language model."""
    return make_checkpoint(tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="session")
def value_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a value head; versions before 0.8 tell a critic by it."""
    return make_checkpoint(tmp_path_factory.mktemp("value"), value_head=True)
