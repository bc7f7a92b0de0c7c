"""The plan refuses none of the configs that NeMo-RL ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..plan.shipped import LORA, hold

UNPLANNED = ("its config trains no model", LORA, "FusedAdam")


@pytest.mark.slow
def test_recipes(checkout: Path) -> None:
    examples = checkout / "examples"
    line = ("python", str(examples / "run_sft.py"), "--config")
    found = sorted(examples.rglob("*.yaml"))
    hold({str(one.relative_to(examples)): (*line, str(one)) for one in found}, *UNPLANNED)
