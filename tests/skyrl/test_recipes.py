"""The plan refuses none of the recipes that SkyRL ships."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

from ..plan.shipped import hold, recorded


@pytest.mark.slow
@pytest.mark.skipif(Version(version("skyrl")) < Version("0.4"), reason="recipes of the newest")
def test_recipes() -> None:
    hold(recorded("skyrl"))
