"""The recipes that a framework ships: how the plan judges each of them.

Recipes that no wheel contains are in ``recipes/``, recorded by
``tests/environments/record_recipes.py``: one line for each set of precision keys, with the number
of recipes that write this set, and the digest of these recipes' text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from .verdicts import Drawn, of_plan


def recorded(name: str) -> dict[str, list[str]]:
    """Maps the first recipe of each set of keys to its launch line."""
    text = Path(__file__).with_name("recipes").joinpath(f"{name}.txt").read_text(encoding="utf-8")
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {recipe: ["python", "-m", *words] for _, _, recipe, *words in lines}


def hold(recipes: Mapping[str, Sequence[str]], *unplanned: str, least: float = 0.9) -> None:
    """Check that the plan calls no recipe illegal, and plans most of them.

    Args:
        recipes: name to launch line.
        unplanned: regular expressions that match why the plan cannot read a recipe.
        least: the share of the recipes that is planned.
    """
    told = Drawn({}, {"rollout": "tell"})
    size = ("--parameters", "30B,experts=29B")
    found = {name: of_plan(words, told, *size).refused for name, words in recipes.items()}
    expected = re.compile(f"precision-shim plan: .*({'|'.join(unplanned) or '(?!)'})", re.DOTALL)
    wrong = [f"{name}: {why}" for name, why in found.items() if why and not expected.match(why)]
    assert not wrong, "\n".join(wrong)
    legal = sum(not why for why in found.values())
    print(f"{legal} of {len(found)} recipes are legal")
    assert legal >= least * len(found)
