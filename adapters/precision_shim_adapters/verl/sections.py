"""Check the sections of verl's config for keys that their dataclasses lack.

In a worker, hydra would raise a TypeError for a key that the dataclass lacks. The shim reads the
dataclasses' fields from verl's source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from precision_shim.adapting import look, versioned
from precision_shim.planning.record import Problem, unknown_keys
from precision_shim.precision.dtypes import parse_dtype
from precision_shim_adapters.megatron.deciding.table import PRECISION_AWARE_FIELDS

from ..fp16.plan import of_torch
from ..resolving import MISSING
from .megatron import has_fields

_PACKAGE = "verl.workers.config"
_MODULES = ("engine", "optimizer", "actor", "critic")
_HYDRAS = ("_target_", "_convert_", "_recursive_", "_partial_")


def unknown(
    section: Mapping[str, Any], key: str, subject: str, *, dispatches: bool
) -> Iterator[Problem]:
    """List the keys of a section and its nested sections that verl's dataclasses lack.

    Args:
        section: a section with hydra's ``_target_``; without ``_target_``, any key is allowed.
        key: the config's key of the section; may be empty.
        subject: the model's name, such as ``"actor"``.
        dispatches: whether the shim adds verl 0.9's dtype fields to ``McoreOptimizerConfig``.
    """
    name = str(section.get("_target_", "")).rpartition(".")[2]
    known = set(_fields(name))
    if name == "McoreOptimizerConfig" and dispatches:
        known.update(PRECISION_AWARE_FIELDS)
    yield from unknown_keys(
        [known_key for known_key in section if known_key not in _HYDRAS],
        known,
        subject,
        f"{key}.{{}}" if key else "{}",
        f"{versioned('verl')}'s {name}",
    )
    for word, inner in section.items():
        if isinstance(inner, Mapping) and "_target_" in inner:
            inner_key = f"{key}.{word}" if key else str(word)
            yield from unknown(inner, inner_key, subject, dispatches=dispatches)


def missing(keys: Iterable[str], read: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each key with OmegaConf's ``???`` that verl certainly reads.

    Args:
        keys: the keys with ``???``.
        read: keys that verl reads, and sections of which verl reads every key.
    """
    for key in keys:
        if any(f"{key}.".startswith(f"{place}.") for place in read):
            yield Problem(
                "missing",
                "",
                key,
                f"{versioned('verl')} reads it, and its value is {MISSING}, which ends the job",
                "Write a value.",
            )


def _fields(name: str) -> tuple[str, ...]:
    if not name:
        return ()
    looks = (look(f"{_PACKAGE}.{module}:{name}.__init__") for module in _MODULES)
    return next((symbol.parameters for symbol in looks if symbol.found), ())


def of_torch_optimizer(optim: Mapping[str, Any], key: str, subject: str) -> Iterator[Problem]:
    """Yield a problem if torch refuses the optimizer's name or one of its arguments."""
    place = str(optim.get("optimizer_impl") or "torch.optim")
    name = str(optim.get("optimizer") or "AdamW")
    if place != "torch.optim":
        return
    written = optim.get("override_optimizer_config") or {}
    keys = f"{key}.optimizer", f"{key}.override_optimizer_config.{{}}"
    yield from of_torch(name, written, keys, subject)


def of_megatron(
    engine: Mapping[str, Any], optim: Mapping[str, Any], keys: tuple[str, str], subject: str
) -> Iterator[Problem]:
    """Yield a problem for each dtype in a Megatron config that verl's own checks refuse.

    Args:
        engine: the engine's section.
        optim: the optimizer's section; empty for a model that is not trained.
        keys: the config keys of the engine's section and of the optimizer's section.
        subject: the model's name, such as ``"actor"``.
    """
    allowed = ("bfloat16", "float16")
    dtype = engine.get("dtype", "bfloat16")
    if dtype not in allowed:
        yield Problem(
            "dtype",
            subject,
            f"{keys[0]}.dtype",
            f"{versioned('verl')}: {keys[0]}.dtype={dtype!r}: its Megatron engine takes "
            f"{' or '.join(allowed)}",
            f"Correct {keys[0]}.dtype.",
        )
    for field in PRECISION_AWARE_FIELDS[1:] if has_fields() else ():
        value = optim.get(field)
        # YAML reads verl's dtype name "32" as a number.
        known = parse_dtype(str(value)) if isinstance(value, int | str) else None
        if field in optim and known not in (torch.float32, torch.bfloat16):
            yield Problem(
                "dtype",
                subject,
                f"{keys[1]}.{field}",
                f"{versioned('verl')}: {keys[1]}.{field}={value!r}: its optimizer's config takes "
                "fp32 or bf16",
                f"Write one of them, or {keys[1]}.override_optimizer_config.{field}.",
            )
