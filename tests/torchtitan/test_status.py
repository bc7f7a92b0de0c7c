"""``status()`` of a real trainer: on one screen, and in the docs as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..status_in_docs import hold, of_a_worker
from .conftest import TORCHTITAN


def test_status_of_a_worker(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = of_a_worker(Path(__file__).with_name("status_worker.py"), tmp_path)
    assert f"torchtitan {TORCHTITAN}, tested: in force" in text
    hold(text, "torchtitan", f"torchtitan-{TORCHTITAN}", request)
