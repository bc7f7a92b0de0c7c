"""The digests of what the seams stand on, as they are recorded for the installed version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .. import versions_in_docs
from ..symbols_in_record import hold, hold_as_a_wheel


def test_the_record_is_current() -> None:
    hold("verl")


def test_a_wheel_of_what_is_installed_is_read_and_not_run(tmp_path: Path) -> None:
    hold_as_a_wheel("verl", tmp_path)


def test_a_record_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "no such folder" / "symbols.json"
    done = subprocess.run(
        [sys.executable, "-m", "precision_shim", "doctor", "--record", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{file} cannot be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_page_of_versions_is_current() -> None:
    versions_in_docs.hold("verl")
