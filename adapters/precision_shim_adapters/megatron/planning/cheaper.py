"""List settings that reduce a model's memory on Megatron, and what each setting costs the user.

``variants`` plans the model once for each entry of ``_STEPS``, as if the user had written the
entry's settings. ``variants`` omits entries that are illegal in the training process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from precision_shim.adapting import Settings
from precision_shim.errors import DtypeError
from precision_shim.precision.dtypes import name_of
from precision_shim.precision.moments import second_moment_can_decay
from precision_shim_adapters.megatron.deciding.legality import REMAINDERS_SINCE, FusedAdamSupport
from precision_shim_adapters.megatron.deciding.table import MEGATRON_BETA2

from ..deciding.requested import PRECISION_AWARE
from .decided import Asked, Holds, Side, problems_of, side, with_shim

_Model = TypeVar("_Model", bound=Asked)
_BUCKET = "grad_reduce_in_fp32"
_MEGATRONS_DEFAULT = "store_param_remainders"
"""A field that is on in Megatron's OptimizerConfig unless the user turns it off."""

_STEPS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (
        "nothing: the masters are kept as remainders, and checkpoints have them in fp32",
        {PRECISION_AWARE: True, "store_param_remainders": True},
    ),
    (
        "precision of the gradients' sum: they are reduced in the model's dtype",
        {PRECISION_AWARE: True, "main_grads_dtype": "model", "grad_reduce_in_fp32": False},
    ),
    (
        "precision of the first moment",
        {
            PRECISION_AWARE: True,
            "main_grads_dtype": "model",
            "grad_reduce_in_fp32": False,
            "exp_avg_dtype": "bf16",
        },
    ),
    (
        "precision of both moments",
        {
            PRECISION_AWARE: True,
            "main_grads_dtype": "model",
            "grad_reduce_in_fp32": False,
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
        },
    ),
    (
        "speed: the host steps the optimizer, in fp32",
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
    ),
    (
        "speed, and precision of the gradients' sum",
        {
            PRECISION_AWARE: True,
            "main_grads_dtype": "model",
            "grad_reduce_in_fp32": False,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
        },
    ),
)
"""Each entry: what the user gives up (the least first), in words, and the settings to write."""


def variants(
    asked: _Model, settings: Settings, support: FusedAdamSupport, holds: Holds
) -> list[tuple[str, tuple[str, ...], _Model]]:
    """Copy a model with cheaper settings, once for each legal entry of ``_STEPS``.

    Returns:
        One tuple for each legal entry: what the user gives up, the config lines, the changed model.
    """
    if not asked.wishes.trains:
        return []
    cheaper = []
    for gives_up, step in _STEPS:
        fields = {
            key: name_of(asked.dtype) if value == "model" else value for key, value in step.items()
        }
        if not _makes_sense(asked, fields, support):
            continue
        lacking = set() if asked.known is None else fields.keys() - {*asked.known, _BUCKET}
        if lacking - {_MEGATRONS_DEFAULT}:
            continue
        fields = {key: value for key, value in fields.items() if key not in lacking}
        other = change(asked, **fields)
        now = with_shim(settings, support, holds)
        try:
            made = side(other, now)
        except DtypeError:
            continue
        if problems_of(other, made, support, holds=holds):
            continue
        if asked.write is None:
            lines = tuple(_line(asked, *item) for item in fields.items())
        elif (read := asked.write(fields)) and _same(side(read[1], now), made):
            lines, other = read
        else:  # the framework refuses the lines, or they do something else
            continue
        cheaper.append((gives_up, lines, other))
    return cheaper


def _same(one: Side, other: Side) -> bool:
    return (one.fields, one.bucket.grad_reduce_in_fp32) == (
        other.fields,
        other.bucket.grad_reduce_in_fp32,
    )


def _makes_sense(asked: Asked, fields: Mapping[str, Any], support: FusedAdamSupport) -> bool:
    bf16 = asked.dtype is torch.bfloat16
    if fields.get("store_param_remainders") and (support.version or ()) < REMAINDERS_SINCE:
        return False
    if not bf16 and {"main_grads_dtype", "store_param_remainders"} & fields.keys():
        return False
    if fields.get("exp_avg_sq_dtype") == "bf16":
        beta2 = float(asked.wishes.asked.get("adam_beta2", MEGATRON_BETA2))
        return second_moment_can_decay(beta2)
    return True


def _line(asked: Asked, field: str, value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{asked.prefix}{asked.key_of(field)}={text}"


def change(asked: _Model, **fields: Any) -> _Model:
    """Copy a model with changed fields of the optimizer's config, as if the user wrote them."""
    bucket = fields.pop("grad_reduce_in_fp32", asked.wishes.bucket_in_fp32)
    written = {**asked.wishes.asked, **fields}
    return replace(asked, wishes=replace(asked.wishes, asked=written, bucket_in_fp32=bucket))
