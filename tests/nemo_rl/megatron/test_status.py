"""``status()`` of a real NeMo-RL worker: on one screen, and in the docs as it is."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from ...rank_server import Ranks
from ...status_in_docs import hold, of_a_worker
from ..support import NEMO_RL


def test_status_of_a_worker(ranks: Ranks, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = of_a_worker(Path(__file__).with_name("status_worker.py"), tmp_path, ranks)
    # The tag v0.5.0 calls itself 0.5.0rc0.
    tag = Version(version("nemo-rl")).public
    assert f"nemo-rl {tag}, tested: in force" in text
    hold(text, "nemo-rl", f"nemo-rl-{NEMO_RL.base_version}", request)
