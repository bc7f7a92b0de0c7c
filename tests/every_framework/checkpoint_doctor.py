"""Runs the checkpoint doctor in the process that is about to load the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from precision_shim_tools.checkpoint.prediction import Here
from precision_shim_tools.checkpoint.report import Examined, examine

from .in_force import refused

FP16 = {"precision": "fp16"}
"""The config of a job whose checkpoint may lack the loss scaler's record."""


def ask(
    folder: Path | str,
    framework: str,
    config: Mapping[str, Any] | None = None,
    *,
    on: bool | None = None,
) -> Examined:
    """The doctor's report on a checkpoint of one model that this process would resume.

    Args:
        folder: where it is.
        framework: whose it is.
        config: what the job's own config sets; ``None`` to read it from the checkpoint.
        on: whether the shim is on in the resuming process; ``None``: as in this process.
    """
    here = Here.now(config)
    (found,) = examine(folder, here if on is None else replace(here, on=on), framework)
    return found


def verdict(*arguments: Any, **named: Any) -> str:
    return ask(*arguments, **named).outcome.verdict


def hold_groups(folder: Path, framework: str, groups: Mapping[str, bool]) -> None:
    """The doctor requires exactly the seams for fp16 of the worker that wrote the files.

    Args:
        folder: a checkpoint that resumes exactly.
        framework: whose it is.
        groups: each group of seams, and whether the doctor requires it.
    """
    assert ask(folder, framework, FP16, on=True).outcome.exact
    # The job would not read this field, and what it does instead is not known.
    assert verdict(folder, framework, {**FP16, "exp_avg_dtype": "bf16"}, on=True) == "not known"
    for group, required in groups.items():
        with refused(framework, "fp16-scaling", group):
            assert ask(folder, framework, FP16, on=True).outcome.exact is not required


def told_by(outcome: str) -> str:
    """Translate a real load's outcome in a test into the doctor's verdict."""
    words = {
        "exact": "exact",
        "exact until it trains": "exact",
        "other weights": "misread",
        "CheckpointLayoutError": "refused",
        "ScalerCheckpointError": "refused",
    }
    return words.get(outcome, "fails")
