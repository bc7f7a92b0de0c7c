"""Call a framework's own parsers and config classes for a plan."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import TypeVar

from ..errors import PlanError
from .values import said

T = TypeVar("T")


def call_quietly(call: Callable[[], T], refuse: Callable[[str], PlanError]) -> T:
    """Call a framework's function, and suppress its output and warnings.

    Args:
        call: the call.
        refuse: function that converts the text of the framework's error into the error to raise.

    Returns:
        The result of ``call``.

    Raises:
        PlanError: the framework raised an error, or argparse raised SystemExit.
    """
    printed = io.StringIO()
    try:
        with redirect_stderr(printed), redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()
    except PlanError:
        raise
    except (Exception, SystemExit) as error:  # argparse raises SystemExit, config classes any error
        lines = printed.getvalue().strip().splitlines()
        why = lines[-1] if isinstance(error, SystemExit) and lines else said(error)
        raise refuse(why) from error
