"""The dtype names that the FSDP engines of both verl and SkyRL accept; float16 without a scaler."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from precision_shim.errors import DtypeError
from precision_shim.precision.dtypes import name_of, parse_dtype

_NAMES = ("bf16", "bfloat16", "fp16", "float16", "16", "fp32", "float32", "32")
"""The dtype names in ``PrecisionType.to_dtype``, which accepts no others."""


def own_dtype(value: Any, key: str, where: str) -> torch.dtype:
    """Convert a value in the config of verl's or SkyRL's FSDP engine to a dtype.

    ``value`` is a dtype, a name, or the number 16 or 32; ``where`` is framework and version.

    Raises:
        DtypeError: the engine does not accept the name; the error names the config's ``key``.
    """
    name = name_of(value) if isinstance(value, torch.dtype) else str(value)
    dtype = parse_dtype(name) if name in _NAMES else None
    if dtype is not None:
        return dtype
    raise DtypeError(
        f"{where}: {key}={value!r} names no dtype that its FSDP engine takes; allowed: "
        f"{', '.join(_NAMES)}, spelled so. Correct {key}.",
        key=key,
    )


def unscaled(where: str, written: Collection[str], computes: torch.dtype | None, key: str) -> str:
    """A warning about float16 in parameters or reductions if the loss is not scaled, or empty.

    ``written`` are the keys that say float16, and ``key`` is that of the dtype ``computes``, in
    which the layers compute.
    """
    if not written or computes in (None, torch.float16):
        return ""
    return (
        f"{where}: {', '.join(written)}=float16 is no fp16 training here: the layers compute in "
        f"{name_of(computes)}, and the loss is not scaled, so small gradients become zero and "
        f"large ones inf. Leave it out, or set {key}=float16 to train in float16."
    )
