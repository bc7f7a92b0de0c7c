"""What the rules assume of torch and its scalers, asked of what is installed."""

from __future__ import annotations

from ..probes_hold import hold


def test_what_the_rules_assume_holds() -> None:
    hold("torchtitan")
