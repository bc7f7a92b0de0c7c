"""The digests of what the seams stand on, as they are recorded for the installed version."""

from __future__ import annotations

from ..symbols_in_record import hold


def test_the_record_is_current() -> None:
    hold("torchtitan")
