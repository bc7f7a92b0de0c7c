"""The plan refuses none of the configs that NeMo-RL ships."""

from __future__ import annotations

import re
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import pytest

from ..plan.shipped import CHECKOUT, Recipe, hold

UNPLANNED = {
    "its config trains no model": "train no model",
    "FusedAdam": "train with TransformerEngine's FusedAdam on DTensor",
}
KEY = re.compile("precision|dtype|[bf]p?(8|16)|megatron_cfg|lora")
BASE = re.compile(r"^defaults:\s*(?:-\s*)?(\S+)$", re.MULTILINE)


def keys(file: Path) -> tuple[str, ...]:
    """A config's lines on precision, after those of the config that it changes."""
    text = file.read_text("utf-8")
    bases = [one for name in BASE.findall(text) for one in keys(file.parent / name.strip("\"'"))]
    return (*bases, *(line.strip() for line in text.splitlines() if KEY.search(line)))


@pytest.mark.slow
def test_recipes(checkout: Path) -> None:
    """One config for each set of keys."""
    examples = Path(CHECKOUT or checkout, "examples")
    line = ("python", str(examples / "run_sft.py"), "--config")
    alike: dict[tuple[str, ...], list[Path]] = defaultdict(list)
    for one in sorted(examples.rglob("*.yaml")):
        alike[keys(one)].append(one)
    recipes = {
        str(one.relative_to(examples)): Recipe((*line, str(one)), 1 + len(others))
        for one, *others in alike.values()
    }
    hold(f"NeMo-RL {version('nemo-rl')}", recipes, UNPLANNED)
