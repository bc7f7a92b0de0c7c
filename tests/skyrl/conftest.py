"""The real SkyRL on the real megatron-core and Megatron-Bridge, on a CPU.

Everything of the frameworks is imported inside fixtures: collecting must stay cheap, and what the
frameworks warn about at import is theirs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.version import Version

import precision_shim
from precision_shim.testing.skyrl_cpu import flash_attn_placeholder

from .support import make_checkpoint

try:
    SKYRL = Version(version("skyrl"))
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]
    SKYRL = Version("0")

TRANSFORMER_ENGINE = "2.11.0"


def pytest_configure(config: pytest.Config) -> None:
    """Before transformers looks at what is installed."""
    if Version("0") == SKYRL or "transformers" in sys.modules:
        return
    folder = tempfile.TemporaryDirectory(prefix="flash_attn")
    config.add_cleanup(folder.cleanup)
    sys.path.insert(0, str(flash_attn_placeholder(Path(folder.name))))


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
def skyrl() -> None:
    """SkyRL and all that it builds on, imported without the shim."""
    from precision_shim.testing.megatron_bridge import import_megatron_bridge

    import_megatron_bridge()
    import skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker
    import skyrl.backends.skyrl_train.workers.megatron.megatron_worker  # noqa: F401


@pytest.fixture(scope="session")
def cpu(skyrl: None) -> Iterator[None]:
    """One process on a CPU, with Megatron's parallel state."""
    from precision_shim.testing.megatron_cpu import megatron_on_cpu, model_parallel
    from precision_shim.testing.skyrl_cpu import skyrl_on_cpu

    with megatron_on_cpu(), skyrl_on_cpu(), model_parallel():
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
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same tiny model in each dtype, by the dtype's name."""
    return {
        name: make_checkpoint(tmp_path_factory.mktemp(name), name)
        for name in ("bfloat16", "float16", "float32")
    }
