"""Write a command's result, in colours if the output is a terminal and rich is installed."""

from __future__ import annotations

import contextlib
import os
import re
import sys

__all__ = ["READER_GONE", "show", "write"]

READER_GONE = 141
"""Exit status, as of SIGPIPE in a shell, if the program that reads the output has ended."""

_STYLES = {
    r"^[^\s:].*$": "bold",
    r"\b(would be in force|in force|can be patched|no problems|to wrap)\b": "green",
    r"\b(refused|not active|cannot be \w+|problems)\b(?<!no problems)": "red",
    r"\b(not on|not tested|waits for \w+( \w+)?)\b": "yellow",
}


def show(text: str) -> None:
    """Print a text, in colours if the output is a terminal and rich is installed."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            shown = Text(_printable(text))
            for pattern, style in _STYLES.items():
                shown.highlight_regex(re.compile(pattern, re.MULTILINE), style)
            # soft_wrap=True, because wrapping by rich would break columns on a narrow terminal.
            Console(highlight=False).print(shown, soft_wrap=True)
            return
    write(text)


def _printable(text: str) -> str:
    """Escape characters that the output's encoding lacks, such as non-UTF-8 bytes of a path."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def write(text: str) -> None:
    """Print a text; raise ``SystemExit`` if it cannot be written, or its reader has ended."""
    try:
        print(_printable(text), flush=True)
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # Python flushes the output again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(READER_GONE) from None
        told = f"precision-shim: the output cannot be written: {error.strerror or error}"
        print(told, file=sys.stderr)
        raise SystemExit(2) from None
