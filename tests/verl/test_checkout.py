"""verl as a checkout on ``PYTHONPATH``."""

from __future__ import annotations

from pathlib import Path

from ..checkouts import as_checkout, as_installed


def test_a_checkout_is_the_version_that_it_states(tmp_path: Path) -> None:
    installed, found = as_installed("verl"), as_checkout("verl", tmp_path)
    assert found.version == installed.version.partition("+")[0]
    assert found.tested is installed.tested
    assert found.reason == installed.reason
    assert found.problems == installed.problems
    assert found.seams == installed.seams
