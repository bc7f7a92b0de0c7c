"""Trainer and generator in two processes of Monarch's: steps, weights that arrive, and the audit.

The processes inherit PRECISION_SHIM=1, and the start-up file patches torchtitan. Only vLLM's engine
is a stand-in (``monarch_generator``); it needs CUDA here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from precision_shim.auditing import sent_weights

from ..processes.commands import command, python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def drive(*words: object, name: str = "monarch_driver", **variables: str) -> dict[str, Any]:
    """What a driver of this folder prints, started as a program with the given variables."""
    start = ("-W", "ignore", "-m", f"tests.torchtitan.{name}")
    # Without the source tree on the path, the installed package is tested.
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = python(*start, *words, cwd=ROOT, timeout=280, **variables)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(json.loads(lines[-1]))


def test_an_overflow_is_skipped_and_the_generator_has_the_weights(
    start_up_file: None, tmp_path: Path
) -> None:
    folder = tmp_path / "audit"
    on = {"PRECISION_SHIM": "1", "PRECISION_SHIM_AUDIT_DIR": str(folder)}
    found = drive(tmp_path, "float16", " BF16", **on)
    metrics = found["metrics"]
    assert [one["trainer/skipped_steps"] for one in metrics] == [0.0, 1.0]
    assert metrics[1]["trainer/grad_norm/mean"] == "nan"
    assert found["attention"] == ["torch.float16"]
    assert (found["enabled"], found["dtype"], found["version"]) == (True, "bfloat16", 2)
    assert found["held"] == ["torch.bfloat16"]
    # The engine has each of the trainer's fp32 weights, rounded once.
    assert found["sent"].keys() == found["weights"].keys()
    for name, one in found["sent"].items():
        rounded = torch.tensor(one).to(torch.bfloat16).float()
        assert rounded.isfinite().all()
        assert torch.equal(rounded, torch.tensor(found["weights"][name]))
    ((_, sent),) = sent_weights.read(str(folder))
    assert isinstance(sent, sent_weights.Sent)
    assert (sent.asked, sent.computes, sent.sync) == ("bfloat16", "fp16", 2)
    assert sent.sent["weights"].dtypes.keys() == {"bf16"}
    code, said, _ = command("audit", folder)
    assert code == 1, said
    assert "contradiction, rank 0: rollout-dtype" in said


def test_a_rank_without_the_shim_is_named(tmp_path: Path) -> None:
    both, (told, nothing) = drive(tmp_path, name="monarch_ranks")["told"]
    assert both == ["", ""]
    assert "of 2 ranks, rank 1: without the shim" in told
    assert nothing == ""
