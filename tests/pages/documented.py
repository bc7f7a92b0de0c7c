"""Reads the shell commands in README and docs, for the tests that check them.

A command is a line of a ``sh`` block, or of an indented block that begins with a known program or a
framework's setting. A line after ``$`` in any other block is a command, too. Inline code is a
command if it begins with a known program and has arguments. Lines that end in a backslash are
joined; comments are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
_PROGRAM = re.compile(
    r"""(?:\w+=(?:'[^']*'|"[^"]*"|\S*)[ ]+)*  # variables in front
    (?:\.venv/bin/)?
    (?:precision-shim|python3?|pip|uv|tox|torchrun|ray|sh|git|export|unset)\b[ ]+[^\s`]""",
    re.VERBOSE,
)
SETTING = re.compile(r"(?:\+{0,2}|--)[a-z_]\w*(?:\.\w+)+=\S")
"""The beginning of a framework's setting, such as ``a.b=c``, also after ``+``, ``++`` or ``--``."""
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:\A|(?<=\n\n))((?: {4}.*\n|\n(?= {4}))+)")


def commands(page: Path) -> list[str]:
    """The commands of one page, in order, each on one line with single spaces."""
    text = page.read_text(encoding="utf-8")
    found = []
    for _, language, block in _FENCE.findall(text):
        if language in ("sh", "bash", "console", "shell"):
            found += _lines(block)
        else:
            found += _lines("".join(_behind_prompts(block)))
    rest = _FENCE.sub("\n", text)
    for block in _INDENTED.findall(rest):
        if _PROGRAM.match(block.strip()) or SETTING.match(block.strip()):
            found += _lines(block)
    rest = _INDENTED.sub("\n", rest)
    inline = (" ".join(one.split()) for one in re.findall(r"(?<!`)`([^`]+)`(?!`)", rest))
    return found + [one for one in inline if _PROGRAM.match(one)]


def blocks(page: Path) -> list[str]:
    """All code blocks of one page, in any language."""
    text = page.read_text(encoding="utf-8")
    return [one for _, _, one in _FENCE.findall(text)] + _INDENTED.findall(_FENCE.sub("\n", text))


def _behind_prompts(block: str) -> Iterator[str]:
    goes_on = False
    for line in block.splitlines(keepends=True):
        if goes_on or line.startswith("$ "):
            yield line if goes_on else line[2:]
            goes_on = line.endswith("\\\n")


def _lines(block: str) -> list[str]:
    joined = re.sub(r"\s*\\\n\s*", " ", re.sub(r"(?:^|[ ]+)#.*", "", block, flags=re.MULTILINE))
    return [" ".join(line.split()) for line in joined.splitlines() if line.strip()]
