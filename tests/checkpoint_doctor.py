"""The checkpoint doctor, asked in the process that is about to load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precision_shim.checkpoints.foretelling import Here
from precision_shim.checkpoints.report import Examined, examine

FP16 = {"precision": "fp16"}
"""What the config of a job says whose checkpoint may have no loss scaler's record."""


def ask(
    folder: Path | str,
    framework: str,
    config: Mapping[str, Any] | None = None,
    *,
    on: bool | None = None,
) -> Examined:
    """What the doctor says of a checkpoint of one model, resumed in this process.

    Args:
        folder: where it is.
        framework: whose it is.
        config: what the job's own config asks for; ``None`` to leave that to the file.
        on: whether the shim is on where it is resumed; ``None``: as in this process.
    """
    here = Here.now(config)
    (found,) = examine(folder, here if on is None else here.but(on=on), framework)
    return found


def verdict(*arguments: Any, **named: Any) -> str:
    """The same, in one word."""
    return ask(*arguments, **named).outcome.verdict


def told_by(outcome: str) -> str:
    """The doctor's word for what a test saw a real load do."""
    words = {
        "exact": "exact",
        "exact until it trains": "exact",
        "other weights": "misread",
        "CheckpointLayoutError": "refused",
        "ScalerCheckpointError": "refused",
    }
    return words.get(outcome, "fails")
