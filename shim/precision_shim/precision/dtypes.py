"""Convert the dtype names in configs to torch dtypes, and torch dtypes to canonical names.

The accepted names are from Megatron-LM's ``dtype_map`` (``fp32``, ``bf16``, ``fp16``, ``fp8``) and
from verl's and SkyRL's configs. ``fp8`` and ``float8`` mean ``torch.uint8``, because
TransformerEngine stores FP8 optimizer states as bytes with a separate scale.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..errors import DtypeError
from .names import ALIASES

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}
"""dtypes by their canonical names."""

_BY_NAME = {**DTYPES, **{alias: DTYPES[name] for alias, name in ALIASES.items()}}
_BY_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


def accepted_names(names: Collection[str] = tuple(DTYPES)) -> str:
    """Return accepted dtype names as text: canonical ``names``, each with its aliases."""
    return ", ".join(
        "/".join([name, *(alias for alias, target in ALIASES.items() if target == name)])
        for name in names
    )


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's canonical name (``"bf16"``), or torch's name (``"float64"``)."""
    return _BY_DTYPE.get(dtype, str(dtype).removeprefix("torch."))


def live_name(dtype: torch.dtype, *, fp8: bool = False) -> str:
    """Return a live tensor's dtype as ``name_of`` does; bytes are ``uint8`` unless ``fp8``."""
    return "uint8" if dtype is torch.uint8 and not fp8 else name_of(dtype)


def parse_dtype(name: str) -> torch.dtype | None:
    """Return the dtype that a name means, or ``None``; case and ``torch.`` are ignored."""
    return _BY_NAME.get(name.strip().lower().removeprefix("torch."))


def read_dtype(value: Any) -> Any:
    """Return the dtype that a name means, and every other value, unknown names too, unchanged."""
    return (parse_dtype(value) or value) if isinstance(value, str) else value


def coerce_dtype(value: object, *, key: str, where: str = "", but: Collection[str] = ()) -> object:
    """Convert a dtype name to a ``torch.dtype``; return every other value unchanged.

    ``key`` and ``where`` (framework and version) are for the message. ``but``: canonical names that
    the key does not take.

    Raises:
        DtypeError: the value is a string, but not the name of a dtype.
    """
    if not isinstance(value, str):
        return value
    dtype = parse_dtype(value)
    if dtype is None or name_of(dtype) in but:
        allowed = accepted_names([name for name in DTYPES if name not in but])
        raise DtypeError(
            f"{where + ': ' if where else ''}{key}={value!r} is not a dtype name"
            f"{' for this key' if but else ''}; allowed: {allowed}, in any case, also with the "
            f"prefix 'torch.'. Correct {key}.",
            key=key,
        )
    return dtype


def any_dtype(value: object) -> torch.dtype | None:
    """Return the dtype that a value means, also one that only torch names, such as ``fp64``."""
    if not isinstance(value, str):
        return value if isinstance(value, torch.dtype) else None
    name = value.strip().lower().removeprefix("torch.")
    found = parse_dtype(name) or getattr(torch, re.sub(r"^fp(?=\d)", "float", name), None)
    return found if isinstance(found, torch.dtype) else None


def pick_name(
    value: object, names: Collection[str], *, key: str, where: str = "", also: Sequence[str] = ()
) -> str:
    """Return the one of a framework's ``names`` for the dtype that ``value`` means.

    ``also``: words that the key takes besides, for the message.

    Raises:
        DtypeError: none of them means this dtype.
    """
    dtype = value if isinstance(value, torch.dtype) else any_dtype(str(value))
    for name in names:
        if value == name or (dtype is not None and any_dtype(name) is dtype):
            return name
    raise DtypeError(
        f"{where + ': ' if where else ''}{key}={value!r} is not a dtype that this key takes; "
        f"allowed: {accepted_names(names)}, in any case, also with the prefix 'torch.'"
        f"{'; and ' * bool(also)}{', '.join(also)}. Correct {key}, or leave it out.",
        key=key,
    )


def coerce_dtypes(config: Mapping[str, Any] | None, *, where: str = "") -> dict[str, Any]:
    """Return a new dict, with the dtype names under all ``*_dtype`` keys converted.

    ``where``: framework and version, for messages. ``None`` counts as an empty mapping.

    Raises:
        DtypeError: a string under a ``*_dtype`` key is not the name of a dtype.
    """
    return {
        key: (
            coerce_dtype(value, key=key, where=where)
            if isinstance(key, str) and key.endswith("_dtype")
            else value
        )
        for key, value in (config or {}).items()
    }
