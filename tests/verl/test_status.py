"""``status()`` of a real verl worker: on one screen, and in the docs as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from ..status_in_docs import hold, of_a_worker
from .conftest import VERL


@pytest.mark.skipif(
    Version("0.7") > VERL, reason="verl 0.6's engine: covered whole by test_untested_version"
)
def test_status_of_a_worker(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = of_a_worker(Path(__file__).with_name("status_worker.py"), tmp_path)
    assert f"verl {VERL}, tested: in force" in text
    hold(text, "verl", f"verl-{VERL}", request)
