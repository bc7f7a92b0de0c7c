"""Values of a framework's config that a plan counts with, read one by one and named where wrong.

And the refusals that are the same for every framework.
"""

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


def number_of(section: Mapping[str, Any], key: str, where: str, default: int = 1) -> int:
    """A whole number of a section, by the whole key; the default where there is none.

    Raises:
        PlanError: it is something else.
    """
    value = section.get(key.rpartition(".")[2])
    return default if value is None else number(value, key, where)


def said(error: BaseException) -> str:
    """What an error of a framework's loader says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def no_adapters(where: str, without: str) -> PlanError:
    """A model that is trained by LoRA adapters.

    Args:
        where: framework, version and model or key.
        without: the keys that turn them off.
    """
    return PlanError(
        f"{where}: LoRA adapters are not planned: their states are small, and the frozen model "
        "keeps its parameters alone. Plan the job without them for an upper bound "
        f"({without})."
    )
