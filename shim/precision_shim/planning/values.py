"""Values of a framework's config that a plan counts with, read one by one and named where wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import PlanError


def number(value: object, key: str, where: str) -> int:
    """A value that is to be a whole number.

    Args:
        value: as the config has it.
        key: where the config has it.
        where: framework and version.

    Raises:
        PlanError: it is none.
    """
    try:
        if isinstance(value, int | str):
            return int(value)
    except ValueError:
        pass
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise PlanError(f"{where}, {key}={value!r}: expected a whole number. Write one.")


def mapping(value: object, key: str, where: str) -> Mapping[str, Any]:
    """A value that is to be a section of keys.

    Args:
        value: as the config has it.
        key: where the config has it.
        where: framework and version.

    Raises:
        PlanError: it is something else.
    """
    if isinstance(value, Mapping):
        return value
    kind = type(value).__name__
    raise PlanError(
        f"{where}, {key}={value!r} ({kind}): expected a section with keys. Write the keys in it."
    )
