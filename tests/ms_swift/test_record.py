"""Recorded symbols, versions and checkpoints, compared with the installed version."""

from __future__ import annotations

from pathlib import Path

from ..every_framework import versions_in_docs
from ..every_framework.symbols_in_record import hold, hold_as_a_wheel


def test_the_record_is_current() -> None:
    hold("ms-swift")


def test_a_wheel_of_what_is_installed_is_read_and_not_run(tmp_path: Path) -> None:
    hold_as_a_wheel("ms-swift", tmp_path)


def test_the_page_of_versions_is_current() -> None:
    versions_in_docs.hold("ms-swift")
