"""If ``verl`` and ``megatron`` are both named, verl's adapter acts, and decides everything once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import precision_shim

from .conftest import VERL
from .megatron_fp16_support import Training

pytestmark = pytest.mark.skipif(Version("0.7") > VERL, reason="verl 0.6 is covered elsewhere")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_each_decision_stands_once(
    fused_adam: str,
    checkpoint: Path,
    shim: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dtype: str,
) -> None:
    told = []
    for frameworks in ("verl", "megatron,verl"):
        status = shim(frameworks=frameworks, export=False)
        assert set(frameworks.split(",")) <= {
            name for name, one in status.frameworks.items() if one.state != "off"
        }
        capsys.readouterr()
        one = Training(checkpoint, monkeypatch, dtype=dtype)
        figures = one.train()
        lines = [
            line for line in capsys.readouterr().err.splitlines() if "[precision_shim]" in line
        ]
        decided = [str(each) for each in precision_shim.status().decisions]
        assert len(set(decided)) == len(decided)
        assert len(set(lines)) == len(lines)
        told.append((decided, lines, figures["loss"], one.parameters()))
        precision_shim.uninstall()
        torch.distributed.barrier()
    assert told[0][:3] == told[1][:3]
    assert torch.equal(told[0][3], told[1][3])
    assert any("fp16-scaling" in each for each in told[0][0]) == (dtype == "float16")
