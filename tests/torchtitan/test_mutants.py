"""Changes of what the seams stand on, each of which must be noticed or do no harm."""

from __future__ import annotations

import pytest

from ..mutants import hold


@pytest.mark.slow
def test_changes_of_upstream_are_noticed_or_do_no_harm() -> None:
    hold("torchtitan")
