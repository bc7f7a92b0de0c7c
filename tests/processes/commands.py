"""Runs the command ``precision-shim`` in the test's own process."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

from precision_shim_tools.cli import main


class Ended(NamedTuple):
    """The exit status and the output of a command."""

    code: int
    out: str
    err: str


def command(*words: object) -> Ended:
    """Run a command to its end."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(one) for one in words])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())
