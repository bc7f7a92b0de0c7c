"""Write a command's result, in colours on a terminal with rich, and the progress of a command."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
import threading
import time
from typing import TextIO

READER_GONE = 141
"""Exit status, as of SIGPIPE in a shell, if the program that reads the output has ended."""

_STYLES = {
    r"^[^\s:].*$": "bold",
    r"\b(would be in force|in force|can be patched|no problems|to wrap|ON)\b": "green",
    r"\b(refused|not active|cannot be \w+|problems|OFF)\b(?<!no problems)": "red",
    r"\b(not on|not tested|waits for \w+( \w+)?)\b": "yellow",
}


def show(text: str) -> None:
    """Print a text, in colours if the output is a terminal and rich is installed."""
    Progress.stop()
    text = fitted(text, sys.stdout)
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
            Console(highlight=False).print(shown, soft_wrap=True)  # it is wrapped already
            return
    write(text)


def _columns(stream: TextIO) -> int:
    """Return ``COLUMNS``, or the width of a stream's terminal; 0 if there is neither."""
    with contextlib.suppress(KeyError, ValueError):
        return max(int(os.environ["COLUMNS"]), 0)
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns
    return 0


def fitted(text: str, stream: TextIO) -> str:
    """Wrap the lines that are wider than the terminal, two columns further in than they begin."""
    width = _columns(stream)
    return "\n".join(
        textwrap.fill(
            line.lstrip(),
            width,
            initial_indent=(indent := line[: len(line) - len(line.lstrip())]),
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        if 0 < width < len(line)
        else line
        for line in text.split("\n")
    )


def _printable(text: str) -> str:
    """Escape characters that the output's encoding lacks, such as non-UTF-8 bytes of a path."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def write(text: str) -> None:
    """Print a text; raise ``SystemExit`` if it cannot be written, or its reader has ended."""
    Progress.stop()
    try:
        print(_printable(text), flush=True)
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # Python flushes the output again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(READER_GONE) from None
        message = f"precision-shim: the output cannot be written: {error.strerror or error}"
        print(message, file=sys.stderr)
        raise SystemExit(2) from None


class Progress(threading.Thread):
    """Shows on stderr what a slow command does: in one line that moves, or one line per stage.

    A line moves on a terminal. Elsewhere a stage that ends within a poll is left out.
    """

    quiet = 3.0
    """A command that takes fewer seconds shows nothing."""

    stage = ""
    """What the running command does."""

    def __init__(self, command: str) -> None:
        super().__init__(daemon=True)
        self._command, self._ended = command, threading.Event()
        Progress.stage = ""

    def run(self) -> None:
        """Show the stages until ``stop`` is called."""
        begin, shown, moves = time.monotonic(), "", sys.stderr.isatty()
        while not self._ended.wait(0.2 if shown else self.quiet):
            line = f"{self._command}: {Progress.stage or 'working'}"
            width = (_columns(sys.stderr) or 80) - 1
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                if moves:
                    seconds = time.monotonic() - begin
                    cut = f"{line}, {seconds:.0f} s"[:width]
                    print(f"\r\033[K{cut}", end="", file=sys.stderr, flush=True)
                elif Progress.stage and line != shown:
                    print(line[:width], file=sys.stderr, flush=True)
            shown = line
        if moves and shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    @staticmethod
    def stop() -> None:
        """End the progress before a command's output, and at the command's end."""
        for thread in threading.enumerate():
            if isinstance(thread, Progress):
                thread._ended.set()
                thread.join()
