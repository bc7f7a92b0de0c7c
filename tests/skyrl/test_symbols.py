"""The digests of what the seams stand on, as they are recorded for the installed version."""

from __future__ import annotations

from pathlib import Path

from .. import versions_in_docs
from ..symbols_in_record import hold, hold_as_a_wheel


def test_the_record_is_current() -> None:
    hold("skyrl")


def test_a_wheel_of_what_is_installed_is_read_and_not_run(tmp_path: Path) -> None:
    hold_as_a_wheel("skyrl", tmp_path)


def test_the_page_of_versions_is_current() -> None:
    versions_in_docs.hold("skyrl")
