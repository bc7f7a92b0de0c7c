"""Real Monarch processes inherit PRECISION_SHIM=1, and the start-up file patches torchtitan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..processes.commands import python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def drive(driver: str, *words: str, timeout: float = 240, **variables: str) -> dict[str, Any]:
    """What a driver of this folder prints, started as a program with the given variables."""
    start = ("-W", "ignore", "-m", f"tests.torchtitan.{driver}")
    # Without the source tree on the path, the installed package is tested.
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = python(*start, *words, cwd=ROOT, timeout=timeout, **variables)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(json.loads(lines[-1]))


def train(folder: Path, **variables: str) -> dict[str, Any]:
    """The results of a float16 ``PolicyTrainer`` with an overflow, in a process of Monarch's."""
    return drive("monarch_driver", str(folder), **variables)


def test_with_the_variable(start_up_file: None, tmp_path: Path) -> None:
    found = train(tmp_path, PRECISION_SHIM="1")
    assert found["enabled"]
    metrics = found["metrics"]
    assert [one["trainer/skipped_steps"] for one in metrics] == [0.0, 1.0, 1.0]
    assert metrics[1]["trainer/grad_norm/mean"] == "nan"
    assert found["finite"]
    assert found["attention"] == ["torch.float16"]
