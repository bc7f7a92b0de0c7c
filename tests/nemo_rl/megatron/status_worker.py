"""A real NeMo-RL worker for ``test_contract.py``, which runs this file in a process of its own."""

from __future__ import annotations

from typing import Any

from ...every_framework.status_in_docs import tell


def test_worker(worker: Any, shim: Any) -> None:
    shim()
    with worker("float16", drop=("bf16", "fp16", "params_dtype")):
        tell()
