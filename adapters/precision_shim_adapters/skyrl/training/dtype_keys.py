"""The dtype keys of SkyRL's config: those of ``fsdp_config``, and those that an engine ignores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from precision_shim.adapting import versioned
from precision_shim.precision.dtypes import parse_dtype
from precision_shim.precision.effect import COMPUTES, REDUCES, Written, names_precision

from ...megatron.policy.requested import SETS
from ...torch_fp16.names import own_dtype
from ..config import BUCKET, KWARGS, written_bucket

MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
"""The keys of ``mixed_precision`` that SkyRL reads, and SkyRL's default dtypes for them."""
_SETS = dict(zip(MIXED, (COMPUTES, REDUCES), strict=True))


def has_reference(trainer: Any) -> bool:
    """Whether SkyRL builds a reference model."""
    keys = ("use_kl_loss", "use_kl_in_reward")
    return any(getattr(trainer.algorithm, key, False) for key in keys)


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


def _written(config: Any, section: str) -> Iterator[Written]:
    """Yield the dtype keys of ``fsdp_config``, whose key is ``section``; SkyRL reads no others."""
    mixed = getattr(config, "mixed_precision", None)
    for key, value in vars(mixed).items() if mixed is not None else ():
        if key in _SETS or parse_dtype(str(value)) is not torch.float32:
            yield Written(f"{section}.mixed_precision.{key}", value, _SETS.get(key, ""))


def not_read_by_megatron(trainer: Any, role: str) -> Iterator[Written]:
    """Yield the dtype keys of a model on Megatron that have no effect, or not on every version.

    These are the keys of ``fsdp_config`` that differ from the defaults, in the model's kwargs its
    own dtype and fields of the optimizer, and a reference model's keys for optimizer and bucket.
    """
    model, section = f"trainer.{role}.megatron_config", f"trainer.{role}.fsdp_config"
    meant: dict[torch.dtype | None, str] = {
        torch.float16: in_fp16("megatron", role),
        torch.float32: "trainer.bf16=false",
        torch.bfloat16: "trainer.bf16=true",
    }
    for one in _written(getattr(trainer, role).fsdp_config, section):
        key, dtype = one.key.rpartition(".")[2], parse_dtype(str(one.value))
        if dtype is not MIXED.get(key):
            needs = meant.get(dtype, "") if key == "param_dtype" else ""
            sets = "params" if key == "param_dtype" else ""
            yield replace(one, sets=sets, needs=needs)
    for place, name, value in _of_megatron(trainer, role):
        key, dtype = f"{model}.{place}.{name}", parse_dtype(str(value))
        if place != _MODEL:
            if role == "ref":  # which has neither an optimizer nor gradients
                yield Written(key, value)
        elif name == "fp16":  # from SkyRL 0.4 on, trainer.bf16 wins over it
            yield Written(key, value, "params", "trainer.bf16=false", means="fp16")
        elif name == "params_dtype":  # likewise; before 0.4, true wins over it
            yield Written(key, value, "params", meant.get(dtype, ""))
        elif name in SETS and dtype is not torch.float32:
            needs = f"{model}.{KWARGS}.{name}={value}"
            yield Written(key, value, needs="" if role == "ref" else needs)


def in_fp16(strategy: str, role: str = "policy") -> str:
    """The keys to write so that a model computes in fp16."""
    if strategy == "megatron":
        return f"trainer.bf16=false and trainer.{role}.megatron_config.{_MODEL}.fp16=true"
    return f"trainer.{role}.fsdp_config.mixed_precision.param_dtype=fp16"


def of_fsdp(trainer: Any, role: str) -> Iterator[Written]:
    """Yield the dtype keys of a model on FSDP, and its keys for Megatron, without the defaults."""
    config, section = getattr(trainer, role).fsdp_config, f"trainer.{role}.fsdp_config"
    yield from _written(config, section)
    # On FSDP the flag sets only the dtype in which the reference model is stored.
    unread = trainer.strategy != "megatron" and not has_reference(trainer)
    if unread and not trainer.bf16 and mixed_dtypes(config, section) == MIXED:
        yield Written("trainer.bf16", trainer.bf16, COMPUTES, means="fp32")
    for place, name, value in _of_megatron(trainer, role):
        if parse_dtype(str(value)) is not torch.float32:
            key = f"trainer.{role}.megatron_config.{place}.{name}"
            yield Written(key, value, needs="trainer.strategy=megatron")


_MODEL = "transformer_config_kwargs"


def _of_megatron(trainer: Any, role: str) -> Iterator[tuple[str, str, object]]:
    """Yield section, name and value of the dtype keys in ``megatron_config``."""
    config = getattr(getattr(trainer, role), "megatron_config", None)
    for place in (_MODEL, KWARGS):
        for name, value in (getattr(config, place, None) or {}).items():
            if names_precision(name, value) and not name.startswith("use_"):
                yield place, name, value
    if written_bucket(getattr(config, "ddp_config", None)) is False:
        yield "ddp_config", BUCKET, False
