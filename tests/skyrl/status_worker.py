"""A real SkyRL worker for ``test_contract.py``, which runs this file in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..every_framework.status_in_docs import tell
from .support import build


def test_worker(fused_adam: str, checkpoints: dict[str, Path], shim: Any) -> None:
    shim()
    build(checkpoints["float16"], "trainer.bf16=false")
    tell()
