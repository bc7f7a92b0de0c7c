"""The recipes that a framework ships: how the plan judges each of them.

Recipes that no wheel contains are in ``recipes/``, recorded by
``tests/environments/record_recipes.py``: one line for each set of precision keys, with the number
of recipes that write this set, and the digest of these recipes' text. The variable ``RECIPES_OF``
names a checkout whose recipes are read instead.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..environments.record_recipes import record
from .verdicts import Drawn, of_plan

CHECKOUT = os.environ.get("RECIPES_OF")


class Recipe(NamedTuple):
    """A launch line, and the number of recipes that write the same keys on precision."""

    words: Sequence[str]
    count: int = 1


def recorded(name: str, *folders: str) -> dict[str, Recipe]:
    """Maps the first recipe of each set of keys to its launch line.

    ``folders``: where a checkout of the framework has scripts.
    """
    file = Path(__file__).with_name("recipes") / f"{name}.txt"
    lines = record(Path(CHECKOUT), *folders) if CHECKOUT else file.read_text("utf-8").splitlines()
    lines = (line.replace("-path=./", f"-path={CHECKOUT}/") for line in lines)
    split = [line.split() for line in lines if not line.startswith("#")]
    return {
        recipe: Recipe(["python", "-m", *words], int(count)) for count, _, recipe, *words in split
    }


def hold(name: str, recipes: Mapping[str, Recipe], unplanned: Mapping[str, str]) -> None:
    """Check that the plan calls no recipe illegal, and plans nine of ten; print the table's row.

    Args:
        name: what the row calls the release.
        recipes: the recipes by their names.
        unplanned: maps a regular expression that matches why the plan cannot read a recipe to the
            reason that the row gives.
    """
    told = Drawn({}, {"rollout": "tell"})
    size = ("--parameters", "30B,experts=29B")
    refused: dict[str, list[str]] = defaultdict(list)
    wrong = []
    for recipe, (words, count) in recipes.items():
        why = of_plan(words, told, *size).refused
        found = (reason for text, reason in unplanned.items() if re.search(text, why))
        reason = next(found, "?") if why.startswith("precision-shim plan: ") else "?"
        if why:
            refused[reason] += [recipe] * count
        if why and reason == "?":
            wrong.append(f"{recipe}: {why}")
    every = sum(one.count for one in recipes.values())
    legal = every - sum(map(len, refused.values()))
    reasons = "; ".join(f"{len(refused[one])} {one}" for one in sorted(refused))
    print(f"\n| {name} | {every} | {legal} | {reasons} |")
    assert not wrong, "\n".join(wrong)
    assert legal >= 0.9 * every
