"""The proof on a GPU (``benchmarks.gpu``) without a GPU: all parts run on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

from ..processes.commands import python
from .test_on_gpu import NAMES, ROOT


def test_every_part_runs_and_every_check_holds(tmp_path: Path) -> None:
    done = python("-m", "benchmarks.gpu", "--out", tmp_path, "--dry-run", cwd=ROOT)
    parts = json.loads((tmp_path / "proof.json").read_text(encoding="utf-8"))["parts"]
    assert {name: part["state"] for name, part in parts.items()} == dict.fromkeys(NAMES, "ran")
    assert done.returncode == 0, done.stdout + done.stderr
    for name, part in parts.items():
        assert part["results"], name
        assert part["checks"], name
        assert [one for one in part["checks"] if one["holds"] is False] == []
