"""What is recorded and documented of the installed version is current."""

from __future__ import annotations

from .. import versions_in_docs
from ..symbols_in_record import hold


def test_the_record_is_current() -> None:
    hold("skyrl")


def test_the_page_of_versions_is_current() -> None:
    versions_in_docs.hold("skyrl")
