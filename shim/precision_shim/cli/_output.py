"""Print a command's text, on a terminal in colours if rich is installed."""

from __future__ import annotations

import re
import sys

__all__ = ["show"]

_STYLES = {
    r"^[^\s:].*$": "bold",
    r"\b(would be in force|in force|can be patched|no problems|to wrap)\b": "green",
    r"\b(refused|not active|cannot be \w+|problems)\b(?<!no problems)": "red",
    r"\b(not on|not tested|waits for \w+( \w+)?)\b": "yellow",
}


def show(text: str) -> None:
    """Print a text, on a terminal in colours if rich is installed."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            shown = Text(text)
            for pattern, style in _STYLES.items():
                shown.highlight_regex(re.compile(pattern, re.MULTILINE), style)
            # soft_wrap=True, because wrapping by rich would break columns on a narrow terminal.
            Console(highlight=False).print(shown, soft_wrap=True)
            return
    print(text)
