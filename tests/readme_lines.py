"""The commands that README.md tells users to paste, for the tests that give them to a framework."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commands(framework: str) -> list[list[str]]:
    """Each command of the framework's block, as words, without ``...`` and comments."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(rf"\(docs/{framework}\.md\)\*\*.*?:\n\n((?:    .*\n)+)", text)
    assert block, f"README.md has no block of {framework}"
    lines = re.sub(r"\s*\\\n\s*", " ", re.sub(r"\s+#.*", "", block[1])).splitlines()
    return [[word for word in shlex.split(line) if word != "..."] for line in lines]


def overrides(framework: str, starter: str) -> list[list[str]]:
    """What follows the entry point in each command that has it.

    Args:
        framework: as users write it.
        starter: the entry point's word in the command.
    """
    found = [one[one.index(starter) + 1 :] for one in commands(framework) if starter in one]
    assert found, f"README.md starts no {starter}"
    return found
