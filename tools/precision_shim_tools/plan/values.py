"""Read single values of a framework's config for a plan, and name a wrong value in an error."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from precision_shim.errors import PlanError


def number(value: object, key: str, where: str) -> int:
    """Return a config value as a whole number.

    Raises:
        PlanError: the value is not a whole number.
    """
    try:
        if isinstance(value, int | str | float) and int(value) == float(value):
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise PlanError(f"{where}, {key}={value!r}: expected a whole number. Write one.")


def number_of(section: Mapping[str, Any], key: str, where: str, default: int = 1) -> int:
    """Return the number under the last part of the dotted ``key``; ``default`` if there is none.

    Raises:
        PlanError: the value is not a whole number.
    """
    value = section.get(key.rpartition(".")[2])
    return default if value is None else number(value, key, where)


def mapping(value: object, key: str, where: str) -> Mapping[str, Any]:
    """Return a config value that must be a section with keys.

    Raises:
        PlanError: the value is not a mapping.
    """
    if isinstance(value, Mapping):
        return value
    raise no_section(value, key, where)


def section_of(section: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Return the section under the last part of ``key``; one that is left out or null is empty.

    Raises:
        PlanError: the value is not a mapping.
    """
    value = section.get(key.rpartition(".")[2])
    return {} if value is None else mapping(value, key, where)


def no_section(value: object, key: str, where: str) -> PlanError:
    """Return the error that ``mapping`` raises for a value that is not a mapping."""
    kind = type(value).__name__
    return PlanError(
        f"{where}, {key}={value!r} ({kind}): expected a section with keys. Write the keys in it."
    )


def said(error: BaseException) -> str:
    """Return the type and message of an error in a framework's loader, on one line.

    If the error has no message, such as that of a bare ``assert``, the line of code stands for it.
    """
    text = one_line(str(error))
    places = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {text or (places and places[-1].line) or ''}"


def one_line(text: str) -> str:
    """Return a text on one line, cut after a word if it is longer than 1000 characters."""
    return textwrap.shorten(text, 1000, placeholder=" ...")


def not_built(subject: str, because: str, wrote: Iterable[object]) -> list[str]:
    """Return a note on the dtypes (``Written``) of a model that the job does not build, if any."""
    keys = ", ".join(dict.fromkeys(map(str, wrote)))
    return [f"{subject}: not built, as {because}; without effect: {keys}"] if keys else []
