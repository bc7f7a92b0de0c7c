"""Every place of the framework that forms gradients or steps is on docs/versions.md."""

from __future__ import annotations

from ..stepping_places import hold


def test_every_place_is_on_the_page() -> None:
    hold("skyrl")
