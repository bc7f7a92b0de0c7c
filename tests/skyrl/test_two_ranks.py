"""fp16 on FSDP over two gloo ranks: common scale and skips, exact resume, weights rounded once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..processes.rank_server import Ranks
from .support import python_path

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]


@pytest.mark.timeout(600)
def test_resume_is_exact_on_two_ranks(
    ranks: Ranks, tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    ranks(
        "script",
        arguments=[str(HERE.with_name("ranks.py")), str(tmp_path), str(checkpoints["float32"])],
        environment={**os.environ, "PYTHONPATH": python_path(ROOT)},
        cwd=str(ROOT),
        timeout=550,
    )
    assert all("everything held" in one for one in ranks.said)
