"""Trainer and generator in two processes of Monarch's: the weights that arrive, and the audit.

Only vLLM's engine is a stand-in (``monarch_generator``); it needs CUDA here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from precision_shim.auditing import sent_weights

from ..processes.commands import command
from .test_monarch import drive

pytestmark = pytest.mark.slow


def run(folder: Path, trainer: str, generator: str, **variables: str) -> dict[str, Any]:
    """What ``monarch_sync_driver`` prints after two steps and two weight syncs."""
    words = (str(folder), trainer, generator)
    return drive("monarch_sync_driver", *words, timeout=280, **variables)


def holds_rounded(found: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether the engine holds each of the trainer's fp32 weights, rounded once."""
    assert found["sent"].keys() == found["weights"].keys()
    return all(
        torch.equal(torch.tensor(one).to(dtype).float(), torch.tensor(found["weights"][name]))
        for name, one in found["sent"].items()
    )


@pytest.mark.parametrize(
    ("generator", "own"), [("half", "float16"), (" BF16", "bfloat16")], ids=["fp16", "bf16"]
)
def test_names_weights_and_audit(
    start_up_file: None, tmp_path: Path, generator: str, own: str
) -> None:
    folder = tmp_path / "audit"
    found = run(
        tmp_path, "float16", generator, PRECISION_SHIM="1", PRECISION_SHIM_AUDIT_DIR=str(folder)
    )
    dtype: torch.dtype = getattr(torch, own)
    assert (found["enabled"], found["dtype"], found["version"]) == (True, own, 2)
    assert found["held"] == [str(dtype)]
    assert holds_rounded(found, dtype)
    ((_, sent),) = sent_weights.read(str(folder))
    assert isinstance(sent, sent_weights.Sent)
    assert (sent.asked, sent.computes, sent.sync) == (own, "fp16", 2)
    names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    assert sent.sent["weights"].dtypes.keys() == {names[dtype]}
    code, said, _ = command("audit", folder)
    other = dtype != torch.float16
    assert code == int(other), said
    assert ("contradiction, rank 0: rollout-dtype" in said) == other


def test_without_the_variable(start_up_file: None, tmp_path: Path) -> None:
    found = run(tmp_path, "bfloat16", "float16")
    assert not found["enabled"]
    assert holds_rounded(found, torch.float16)
