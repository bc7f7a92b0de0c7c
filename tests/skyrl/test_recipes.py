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
    hold(f"SkyRL {SKYRL}", recorded("skyrl", "examples", "integrations"), {})
