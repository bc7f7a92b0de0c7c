"""docs/versions.md lists every place in torchtitan that forms gradients or takes a step."""

from __future__ import annotations

from ..every_framework.stepping_places import hold


def test_every_place_is_on_the_page() -> None:
    hold("torchtitan")
