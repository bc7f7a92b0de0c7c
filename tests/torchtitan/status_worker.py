"""A real RL trainer for ``test_contract.py``, which runs this file in a process of its own."""

from __future__ import annotations

from typing import Any

from ..every_framework.status_in_docs import tell


def test_worker(policy: Any, shim: Any) -> None:
    shim()
    trainer = policy(experts=True, generator_dtype="bf16")
    tell()
    assert trainer.optimizers  # kept until here, as a job keeps it
