"""Read the booleans of Megatron's configs, which a YAML file or a shell may have made strings.

Frameworks and Megatron ask only whether a value is true, so ``"false"`` would turn a feature on.
"""

from __future__ import annotations

from typing import Any

from precision_shim.errors import DtypeError


def is_switch(annotation: object) -> bool:
    """Whether a config's field with this annotation takes a boolean, and no string."""
    text = str(annotation)
    return "bool" in text and "str" not in text and "Literal" not in text


def read_switch(value: Any, key: str, where: str) -> Any:
    """Return ``True`` for a string that means true in YAML, and what is no string unchanged.

    Raises:
        DtypeError: another string.
    """
    if not isinstance(value, str):
        return value
    if value.strip().lower() in ("true", "yes", "on"):
        return True
    raise DtypeError(
        f"{where}: {key}={value!r} is a string, of which frameworks and Megatron ask only whether "
        f"it is empty; allowed: true, false. Write {key} without quotes, as true or false.",
        key=key,
    )
