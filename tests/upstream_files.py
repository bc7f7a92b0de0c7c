"""Files of a framework's repository that no wheel has, fetched for the tests that need them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def fetch(folder: Path, url: str, commits: Sequence[str], path: str) -> Path:
    """Check a path of the first commit that can be had out into a folder; skips where none can.

    Args:
        folder: an existing, empty one.
        url: of the repository.
        commits: hashes or tags, the best first.
        path: the file or folder in the repository.
    """

    def git(*command: str) -> str:
        """Run a command of git's; returns what was wrong."""
        done = subprocess.run(
            ["git", "-c", "gc.auto=0", "-c", "maintenance.auto=false", *command],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        if not done.returncode:
            return ""
        return (done.stderr.strip().splitlines() or ["no message"])[-1]

    git("init", "--quiet")
    git("remote", "add", "origin", url)
    wrong = ""
    for commit in commits:
        wrong = git("fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", commit)
        wrong = wrong or git("checkout", "--quiet", "FETCH_HEAD", "--", path)
        if not wrong:
            return folder
    pytest.skip(f"{url} at {' or '.join(commits)} cannot be fetched: {wrong}")
