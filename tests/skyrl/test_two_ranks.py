"""fp16 on FSDP over two gloo ranks, through FSDPStrategy: one scale, one decision, exact resume."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve()


@pytest.mark.timeout(600)
def test_resume_is_exact_on_two_ranks(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    paths = [one for one in sys.path if Path(one, "flash_attn").is_dir()]
    command = [sys.executable, "-W", "ignore", "-m", "tests.skyrl.ranks"]
    arguments = [str(tmp_path), str(checkpoints["float32"]), *paths]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *arguments],
            cwd=HERE.parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=550)[0] for rank in ranks]
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output[-4000:]
        assert "everything held" in output
