"""What the rules assume of the framework and of Megatron, asked of what is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..probes_hold import hold, hold_on_a_changed_megatron


def test_what_the_rules_assume_holds() -> None:
    hold("verl")


@pytest.mark.slow
def test_a_dropped_assertion_is_named(tmp_path: Path) -> None:
    hold_on_a_changed_megatron(tmp_path)
