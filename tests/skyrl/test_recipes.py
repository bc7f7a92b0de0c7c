"""The plan refuses none of the recipes that SkyRL ships."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

from ..plan.shipped import CHECKOUT, hold, recorded

SKYRL = version("skyrl")


@pytest.mark.slow
@pytest.mark.skipif(Version(SKYRL) < Version("0.4") and not CHECKOUT, reason="of the newest")
def test_recipes() -> None:
    recipes = recorded("skyrl", "examples", "integrations")
    unplanned = {r"Invalid fields \{'arctic_rl'\}": "with keys that SkyRL itself refuses"}
    hold(f"SkyRL {SKYRL}", recipes, unplanned)
