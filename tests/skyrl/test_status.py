"""``status()`` of a real SkyRL worker: on one screen, and in the docs as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..rank_server import Ranks
from ..status_in_docs import hold, of_a_worker
from .conftest import SKYRL
from .support import python_path


def test_status_of_a_worker(
    ranks: Ranks,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    text = of_a_worker(Path(__file__).with_name("status_worker.py"), tmp_path, ranks)
    assert f"skyrl {SKYRL}, tested: in force" in text
    hold(text, "skyrl", f"skyrl-{SKYRL}", request)
