"""Runs the command ``precision-shim`` in the test's own process, and a new Python."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from precision_shim_tools.cli import main

from .composed_once import composed_once


class Ended(NamedTuple):
    """The exit status and the output of a command."""

    code: int
    out: str
    err: str


def command(*words: object) -> Ended:
    """Run a command to its end."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), composed_once():
        try:
            main([str(one) for one in words])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


def python(
    *words: object, cwd: Path | None = None, timeout: float | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a new Python with the inherited variables, except the shim's, and with these."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**clean, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
