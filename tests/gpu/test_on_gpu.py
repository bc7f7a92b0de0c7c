"""The proof on a GPU, part by part: each part runs to its end, and no check fails."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from ..processes.commands import python

ROOT = Path(__file__).parents[2]
NAMES = (
    "memory",
    "step-time",
    "parity",
    "fp16",
    "checkpoints",
    "stand-in",
    "audit-cost",
    "why-fp16",
)
MINUTES = 10

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason=f"needs a GPU; torch {torch.__version__} sees none here"
)
needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs TransformerEngine: benchmarks/gpu/requirements.txt",
)


@needs_gpu
@needs_engine
@pytest.mark.timeout(60 * MINUTES + 60)
@pytest.mark.parametrize("name", NAMES)
def test_part(name: str, tmp_path: Path) -> None:
    options = ("--parts", name, "--minutes", str(MINUTES), "--out", str(tmp_path))
    done = python("-m", "benchmarks.gpu", *options, cwd=ROOT)
    part = json.loads((tmp_path / "proof.json").read_text(encoding="utf-8"))["parts"][name]
    assert part["state"] == "ran", part["reason"]
    assert [one["says"] for one in part["checks"] if one["holds"] is False] == []
    assert done.returncode == 0, done.stdout
