"""The commands that README and start pages tell users to paste, for the frameworks' tests."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commands(framework: str) -> list[list[str]]:
    """Each command of the framework's block, as words, without ``...`` and comments."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(rf"\(docs/start/{framework}\.md\)\*\*.*?:\n\n((?:    .*\n)+)", text)
    assert block, f"README.md has no block of {framework}"
    return _words(block[1])


def on_start_page(framework: str, starter: str) -> list[list[str]]:
    """What follows the entry point on the start page: each command's, then each fragment's.

    A fragment is a block of settings alone, to be added to the command above it.
    """
    page = (ROOT / "docs" / "start" / f"{framework}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    found = [one for block in blocks for one in _words(block)]
    started = [one[one.index(starter) + 1 :] for one in found if starter in one]
    assert started, f"docs/start/{framework}.md starts no {starter}"
    return started + [one for one in found if one[0].startswith(("+", "--"))]


def _words(block: str) -> list[list[str]]:
    lines = re.sub(r"\s*\\\n\s*", " ", re.sub(r"\s+#.*", "", block)).splitlines()
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
