"""Two processes over gloo: all skip together, and a resumed worker continues bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..tiny_models import make_checkpoint
from .support import KINDS

ROOT = Path(__file__).resolve().parents[2]


def run(
    model: Path,
    folder: Path,
    world_size: int,
    kind: str,
    *,
    on: bool = True,
    **dtensor: Any,
) -> Any:
    """Start the processes and return what each found, by rank."""
    given = {
        "kind": kind,
        "model": str(model),
        "folder": str(folder),
        "world_size": world_size,
        "dtensor": dtensor,
        "on": on,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.nemo_rl.ranks", json.dumps({**given, "rank": rank})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]
    try:
        said = [one.communicate(timeout=800) for one in processes]
    finally:
        for one in processes:
            one.kill()
    lines = [
        line.removeprefix("FOUND ")
        for out, _ in said
        for line in out.splitlines()
        if line.startswith("FOUND ")
    ]
    if any(one.returncode for one in processes) or len(lines) != world_size:
        # Where one fails the others lose their connection: each has to be heard.
        pytest.fail("\n".join(f"{out[-1000:]}\n{error[-3000:]}" for out, error in said))
    return [json.loads(line) for line in lines]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "dtensor",
    [{}, {"cpu_offload": True}, {"tensor_parallel_size": 2}],
    ids=["data parallel", "CPU offload", "tensor parallel"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_skip_together_and_resume(
    model: Path, tmp_path: Path, kind: str, dtensor: dict[str, Any]
) -> None:
    if kind == "value":
        # nemo_automodel initializes a missing value head in one process only, and leaves what was
        # in memory otherwise: it has to be in the file.
        model = make_checkpoint(tmp_path / "model", value_head=True)
    found = run(model, tmp_path, 2, kind, **dtensor)
    scales = [step["scale"] for step in found[0]["steps"]]
    assert scales == [65536.0, 32768.0, 32768.0, 65536.0]
    for one in found:
        assert [step["scale"] for step in one["steps"]] == scales
        assert [step["skipped"] for step in one["steps"]] == [0, 1, 1, 1]
        assert one["steps"][1]["norm"] == "nan"
        assert one["parameters"] == found[0]["parameters"]
        assert one["finite"]
        assert one["same"]
        assert one["resumed"] == one["steps"][-1]
    assert found[0]["steps"][1]["metrics"] == [[65536.0], [1.0]]
    assert found[1]["steps"][1]["metrics"] == [None, None]  # once, not summed over the ranks


@pytest.mark.timeout(900)
def test_two_ranks_without_the_shim_are_destroyed(model: Path, tmp_path: Path) -> None:
    found = run(model, tmp_path, 2, "v1", on=False)
    assert not found[0]["finite"]
