"""torchtitan as a checkout on ``PYTHONPATH``, whose version stands beside its packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..checkouts import Told, as_checkout, as_installed

PROJECT = """
[project]
name = "torchtitan"
dynamic = ["version"]

[tool.setuptools.dynamic]
version = {file = "assets/version.txt"}
"""
"""What torchtitan's own ``pyproject.toml`` says of its version."""


@pytest.fixture(scope="module")
def installed() -> Told:
    """What the doctor says of the installed torchtitan."""
    return as_installed("torchtitan")


def test_a_checkout_is_the_version_that_it_states(installed: Told, tmp_path: Path) -> None:
    def add_project(root: Path) -> None:
        (root / "pyproject.toml").write_text(PROJECT)
        (root / "assets").mkdir()
        (root / "assets/version.txt").write_text(f"{installed.version}\n")

    found = as_checkout("torchtitan", tmp_path, add_project)
    assert found.version == installed.version
    assert found.tested is True
    assert (found.problems, found.seams) == (installed.problems, installed.seams)


def test_the_packages_alone_state_none_and_are_like_a_recorded_one(
    installed: Told, tmp_path: Path
) -> None:
    found = as_checkout("torchtitan", tmp_path)
    assert found.version == "unknown"
    assert f"all as in {installed.version}" in found.reason
    assert found.seams == installed.seams
