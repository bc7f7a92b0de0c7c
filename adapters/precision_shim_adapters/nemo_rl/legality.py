"""Check a policy's dtypes with the rules of NeMo-RL's workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from precision_shim.adapting import look, versioned
from precision_shim.planning.record import Problem

from ..fp16.plan import of_torch
from ..megatron import PRECISION_AWARE
from .dtensor import FRAMEWORK
from .places import POLICIES, SETUP

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtype names that NeMo-RL accepts; for other names NeMo-RL raises KeyError or ValueError."""

_CHECKS = (
    f"{SETUP}:_validate_dtype_config",
    *(f"{POLICIES[1]}:MegatronPolicyWorker{end}.__init__" for end in ("", "Impl")),
)
"""NeMo-RL's functions that check the optimizer's flags, in NeMo-RL 0.5 and later."""
_ABSENT = object()
_FLAGS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def names(
    section: Mapping[str, Any], key: str, subject: str, fields: Iterable[str]
) -> Iterator[Problem]:
    """Yield a problem for each present key whose value is not one of NeMo-RL's dtype names.

    Args:
        section: the config section of a policy, a value model or a teacher.
        key: the section's key in the config.
        subject: the model's name, such as ``"policy"``.
        fields: keys within the section; nested keys have dots.
    """
    for field in fields:
        value: Any = section
        for part in field.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT and (not isinstance(value, str) or value not in DTYPES):
            yield Problem(
                "dtype",
                subject,
                f"{key}.{field}",
                f"{versioned(FRAMEWORK)}: {key}.{field}={value!r} names no dtype that NeMo-RL "
                f"takes; allowed: {', '.join(DTYPES)}, spelled so",
                f"Correct {key}.{field}.",
            )


def torch_optimizer(section: Mapping[str, Any], key: str, subject: str) -> Iterator[Problem]:
    """Yield a problem if NeMo-RL cannot find or construct a DTensor worker's optimizer."""
    optimizer = section.get("optimizer") or {}
    if optimizer.get("name") is None:  # the optimizer's name is missing or an unresolved reference
        return
    place = f"{key}.optimizer.name"
    module, _, name = str(optimizer["name"]).rpartition(".")
    if module == "torch.optim":
        keys = place, f"{key}.optimizer.kwargs.{{}}"
        yield from of_torch(name, optimizer.get("kwargs") or {}, keys, subject)
    elif not module:
        yield Problem(
            "key",
            subject,
            place,
            f"{versioned(FRAMEWORK)}: {place}={optimizer['name']!r} is no class with its module",
            "Write one, such as torch.optim.AdamW.",
        )


def of_megatron(section: Mapping[str, Any], key: str, subject: str) -> Iterator[Problem]:
    """Yield a problem for each optimizer flag that NeMo-RL refuses because of ``precision``."""
    if not any("use_precision_aware_optimizer" in look(function).names for function in _CHECKS):
        return  # NeMo-RL 0.4 checks no flags
    dtype = DTYPES[section.get("precision", "bfloat16")]
    optimizer = section["megatron_cfg"].get("optimizer") or {}
    place = f"{key}.megatron_cfg.optimizer"
    if all(optimizer.get(flag, False) for flag in _FLAGS.values()):
        yield Problem(
            "flags",
            subject,
            f"{place}.fp16",
            f"{versioned(FRAMEWORK)}: fp16=true and bf16=true: Megatron-Bridge takes one of them",
            f"Write false for the other one than {key}.precision.",
        )
        return
    if dtype is torch.float32:
        for flag in _FLAGS.values():
            if optimizer.get(flag, False):
                yield Problem(
                    "flags",
                    subject,
                    f"{place}.{flag}",
                    f"{versioned(FRAMEWORK)}: {flag}=true beside {key}.precision=float32",
                    f"Write {place}.{flag}: false.",
                )
        return
    flag = _FLAGS[dtype]
    if optimizer.get(PRECISION_AWARE, False) and not optimizer.get(flag, False):
        other = _FLAGS[torch.bfloat16 if dtype is torch.float16 else torch.float16]
        yield Problem(
            "flags",
            subject,
            f"{place}.{flag}",
            f"{versioned(FRAMEWORK)}: {flag}={str(optimizer.get(flag, False)).lower()} beside "
            f"{key}.precision={section.get('precision')} and {PRECISION_AWARE}=true",
            f"Write {place}.{flag}: true and {place}.{other}: false.",
        )
