"""Real Monarch processes inherit PRECISION_SHIM=1, and the start-up file patches torchtitan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def drive(driver: str, *words: str, timeout: float = 240, **variables: str) -> dict[str, Any]:
    """What a driver of this folder prints, started as a program with the given variables."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
    # Without the source tree on the path, the installed package is tested.
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.torchtitan.{driver}", *words],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
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
