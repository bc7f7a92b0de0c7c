"""Call a framework's own parsers and config classes for a plan."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import TypeVar

from ..errors import PlanError, PrecisionShimError
from .record import Problem
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


def ask_framework(
    check: Callable[[], Callable[[], object]], name: str, where: str, *, is_own: bool = True
) -> tuple[list[Problem], list[str]]:
    """Call a framework's own check of a whole config, and return its refusal.

    Args:
        check: function that imports the check and returns it, bound to a copy of the config.
        name: the check's name.
        where: framework and version.
        is_own: whether the framework's own program calls the check. A user's program may skip the
            check, or register what the check looks for.

    Returns:
        Problems and notes. The refusal is a problem if ``is_own``, and otherwise a note.
    """
    try:
        call = call_quietly(check, PlanError)
    except PlanError as error:
        return [], [f"not called here: {where}'s {name}, which cannot be imported ({error})"]
    try:
        call_quietly(call, PlanError)
    except PlanError as error:
        if isinstance(error.__cause__, PrecisionShimError):  # of the shim's seam; it is planned
            return [], []
        fault = f"{where} refuses the config: {error}"
        if not is_own:
            return [], [f"{name}: {fault}. Your own program may not call {name}"]
        return [Problem("flags", "", name, fault, "Write the values that it asks for.")], []
    return [], []
