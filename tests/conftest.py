"""Fixtures and hooks that the tests of all frameworks share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import precision_shim

from .processes.rank_server import freeze

START_UP = "from precision_shim.process import standby; print(standby.waiting())"
FRAMEWORKS = (
    "areal",
    "flag_trainers",
    "megatron_alone",
    "ms_swift",
    "nemo_rl",
    "probes",
    "rl",
    "roll",
    "skyrl",
    "torchtitan",
    "verl",
    "vllm",
    "worked",
)
TRANSFORMER_ENGINE = "2.11.0"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Our own options; see ``status_in_docs.py``."""
    parser.addoption(
        "--write-docs",
        action="store_true",
        help="write what status() says in a real worker into docs/*.md instead of comparing it",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what other environments run; ignore foreign warnings, but not the shim's.

    A test with ``skipif`` for another framework or version is not collected. If this machine lacks
    something, the reason begins with "needs", and the test is reported as skipped.
    """
    elsewhere = [item for item in items if any(map(_elsewhere, item.iter_markers("skipif")))]
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if item not in elsewhere]
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in FRAMEWORKS:
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)
            item.add_marker(
                pytest.mark.filterwarnings("error::precision_shim.errors.PrecisionShimWarning")
            )


def _elsewhere(mark: pytest.Mark) -> bool:
    return mark.args[0] and not mark.kwargs["reason"].startswith("needs ")


@pytest.fixture(scope="session")
def start_up_file() -> None:
    """Skip if Python's start-up does not load the shim, as in a run from the source tree."""
    done = subprocess.run(
        [sys.executable, "-c", START_UP],
        env={
            **{name: os.environ[name] for name in os.environ if "PRECISION_SHIM" not in name},
            "PRECISION_SHIM": "1",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    if done.stdout != "True\n":
        pytest.skip("needs the package installed, with its start-up file")


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> None:
    """Call ``freeze`` for each test module, because earlier test modules import more modules."""
    freeze()


@pytest.fixture
def shim() -> Iterator[Callable[..., precision_shim.Status]]:
    """Yield ``install``, and uninstall the shim after the test."""
    try:
        yield precision_shim.install
    finally:
        precision_shim.uninstall()


@pytest.fixture
def on(
    shim: Callable[..., precision_shim.Status], framework: str
) -> Callable[..., precision_shim.Status]:
    """``install()`` for the room's fixture ``framework``, strict."""

    def install(
        frameworks: str = framework, features: str | None = None, **settings: Any
    ) -> precision_shim.Status:
        asked = {"frameworks": frameworks, "features": features, "settings": settings}
        return shim(**asked, strict=True, export=False)

    return install


@pytest.fixture(autouse=True)
def no_attention_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo Megatron's variables for one model's attention backend, which break the next model."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Record each call of ``Tensor.to``: the tensor's id and the argument.

    The machine has one device, so a test of an offload observes the calls of ``Tensor.to``.
    """
    import torch

    seen: list[tuple[int, str]] = []
    own = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((id(self), str(args[0]) if args else ""))
        return own(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    return seen


@pytest.fixture
def fused_adam(cpu: None) -> Iterator[str]:
    """Stand in for TransformerEngine's FusedAdam; yields the version that it reports.

    ``cpu`` is the framework's own fixture: it imports what must precede the stand-in.
    """
    from precision_shim_tools.testing.transformer_engine import stand_in_transformer_engine

    with stand_in_transformer_engine(TRANSFORMER_ENGINE) as stand_in:
        yield stand_in.version
