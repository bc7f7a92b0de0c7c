"""The dtype keys of SkyRL's config: those of ``fsdp_config``, and those that an engine ignores."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch

from precision_shim.adapting import versioned
from precision_shim.precision.dtypes import parse_dtype
from precision_shim.precision.effect import COMPUTES, REDUCES, Written

from ...megatron.policy.requested import SETS
from ...torch_fp16.names import own_dtype

MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
"""The keys of ``mixed_precision`` that SkyRL reads, and SkyRL's default dtypes for them."""
_SETS = dict(zip(MIXED, (COMPUTES, REDUCES), strict=True))


def mixed_dtypes(config: Any, section: str = "fsdp_config") -> dict[str, torch.dtype]:
    """Map the keys of ``mixed_precision`` to the dtypes that SkyRL passes to FSDP.

    ``section`` is the key of ``fsdp_config``, for error messages.

    Raises:
        DtypeError: a dtype name is unknown to SkyRL; SkyRL's own error would not name the key.
    """
    mixed = getattr(config, "mixed_precision", None)
    if mixed is None:
        return dict(MIXED)
    where = versioned("skyrl")
    return {
        key: own_dtype(getattr(mixed, key), f"{section}.mixed_precision.{key}", where)
        for key in MIXED
    }


def written(config: Any, section: str = "fsdp_config") -> Iterator[Written]:
    """Yield the dtype keys of ``fsdp_config``, whose key is ``section``; SkyRL reads no others."""
    mixed = getattr(config, "mixed_precision", None)
    for key, value in vars(mixed).items() if mixed is not None else ():
        if key in _SETS or parse_dtype(str(value)) is not torch.float32:
            yield Written(f"{section}.mixed_precision.{key}", value, _SETS.get(key, ""))


def not_read_by_megatron(trainer: Any, role: str) -> Iterator[Written]:
    """Yield the dtype keys of a model on Megatron that have no effect, or not on every version.

    These are the keys of ``fsdp_config`` that differ from the defaults, and in the model's kwargs
    the fp16 flag and fields of the optimizer.
    """
    model, section = f"trainer.{role}.megatron_config", f"trainer.{role}.fsdp_config"
    in_fp16 = f"trainer.bf16=false and {model}.transformer_config_kwargs.fp16=true"
    meant: dict[torch.dtype | None, str] = {
        torch.float16: in_fp16,
        torch.float32: "trainer.bf16=false",
    }
    for one in written(getattr(trainer, role).fsdp_config, section):
        key, dtype = one.key.rpartition(".")[2], parse_dtype(str(one.value))
        if dtype is not MIXED.get(key):
            needs = meant.get(dtype, "") if key == "param_dtype" else ""
            sets = "params" if key == "param_dtype" else ""
            yield replace(one, sets=sets, needs=needs)
    # From SkyRL 0.4 on, trainer.bf16=true wins over the flag.
    for key, value in _dtypes(trainer, role, "transformer_config_kwargs", ("fp16",)):
        yield Written(key, value, "params", "trainer.bf16=false", means="fp16")
    for key, value in _dtypes(trainer, role, "transformer_config_kwargs", _OF_OPTIMIZER):
        needs = f"{model}.optimizer_config_kwargs.{key.rpartition('.')[2]}={value}"
        yield Written(key, value, needs=needs)


def not_read_by_fsdp(trainer: Any, role: str) -> Iterator[Written]:
    """Yield the dtype keys that a model on FSDP has for Megatron."""
    fields = {
        "transformer_config_kwargs": {*_OF_OPTIMIZER, "fp16"},
        "optimizer_config_kwargs": SETS,
    }
    for kwargs, names in fields.items():
        for key, value in _dtypes(trainer, role, kwargs, names):
            yield Written(key, value, needs="trainer.strategy=megatron")


_OF_OPTIMIZER = {*SETS} - {"params_dtype"}


def _dtypes(
    trainer: Any, role: str, kwargs: str, names: Collection[str]
) -> Iterator[tuple[str, object]]:
    """Yield key and value of the dtypes in kwargs for Megatron, without fp32, the default."""
    config = getattr(getattr(trainer, role), "megatron_config", None)
    for name, value in (getattr(config, kwargs, None) or {}).items():
        if name in names and value and parse_dtype(str(value)) is not torch.float32:
            yield f"trainer.{role}.megatron_config.{kwargs}.{name}", value
