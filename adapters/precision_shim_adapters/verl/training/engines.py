"""What verl's VeOmni, Automodel, torchtitan and FSDP Turbo engines share in float16.

Only FSDP Turbo runs the FSDP engine's loop, which uses the engine's ``scaler``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from precision_shim.adapting import (
    Call,
    Seam,
    Symbol,
    current_settings,
    decide,
    is_there,
    seam,
    versioned,
    warn,
)
from precision_shim.errors import UnsupportedPrecisionError
from precision_shim.precision.dtypes import parse_dtype

from ...torch_fp16 import FEATURE
from .fsdp import find_unscaled, fp16_keys, make, read_key

_IMPL = "verl.workers.engine"
VEOMNI = f"{_IMPL}.veomni.transformer_impl:VeOmniEngine"
AUTOMODEL = f"{_IMPL}.automodel.transformer_impl:AutomodelEngine"
TITAN = f"{_IMPL}.torchtitan.transformer_impl:TorchTitanEngine"
TURBO = f"{_IMPL}.fsdp.fsdp_turbo_impl:FSDPTurboEngineWithLMHead"

GROUPS = {
    VEOMNI: "veomni engine",
    AUTOMODEL: "automodel engine",
    TITAN: "torchtitan engine",
    TURBO: "fsdp_turbo engine",
}
"""Maps a training engine of verl to the group of its seams."""

SINCE = {
    VEOMNI: ("verl.workers.engine.automodel",),  # 0.8.0
    AUTOMODEL: ("verl.workers.engine.automodel",),  # 0.8.0
    TITAN: (f"{TITAN}.__init__ mentions ParamGroupConfig",),  # 0.9.0
    TURBO: ("verl.workers.engine.fsdp.fsdp_turbo_impl",),  # 0.9.1
}
"""Maps an engine to conditions; if all of them hold, the shim can scale the engine's fp16 loss."""


def on(engine: str) -> dict[str, Any]:
    """The arguments that all seams for fp16 on one engine share."""
    return {
        "feature": FEATURE,
        "group": GROUPS[engine],
        "delete_when": "the engine scales fp16 losses",
        "optional": True,
        "only_if": SINCE[engine],
    }


def in_fp32(strategy: str, section: str) -> str:
    """The key of an engine's section, with its value, that keeps the parameters in fp32."""
    written = "mixed_precision=true" if strategy == "veomni" else "model_dtype=fp32"
    return f"{section}.{written}"


def is_fp16(value: object) -> bool:
    """Whether a config's value names float16."""
    return value is not None and parse_dtype(str(value)) is torch.float16


IN_FP16: ContextVar[bool] = ContextVar("precision_shim_verl_in_fp16", default=False)
"""Whether the model that VeOmni or torchtitan is building will compute in float16."""


@contextmanager
def in_fp16() -> Iterator[None]:
    """A context in which ``IN_FP16`` is true."""
    token = IN_FP16.set(True)
    try:
        yield
    finally:
        IN_FP16.reset(token)


def policy_of(module: Any) -> torch.dtype | None:
    """The dtype in which FSDP2 gathers a module's parameters; ``None`` if FSDP2 shards nothing."""
    from torch.distributed.fsdp import FSDPModule

    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            gathered: torch.dtype | None = submodule._get_fsdp_state()._mp_policy.param_dtype
            return gathered
    return None


def scale(engine: Any, because: str) -> None:
    """Make the ``ScaledTraining`` of an engine that takes steps.

    Raises:
        UnsupportedPrecisionError: the engine gathers the parameters in another dtype than float16.
    """
    found = policy_of(engine.module)
    if found not in (None, torch.float16):
        raise UnsupportedPrecisionError(
            f"{versioned('verl')}: {because}, but {type(engine).__name__} gathers its parameters "
            f"in {found}; expected torch.float16. Train in bfloat16, or with the fsdp2 engine."
        )
    if not engine.engine_config.forward_only:
        make(engine, None, because, drives=True)


def tell_unscaled(config: Any, computes: torch.dtype | None) -> None:
    """Warn if a trained model's parameters or reductions are in float16, and its layers are not."""
    told = "" if config.forward_only else find_unscaled(config, config.strategy, computes)
    if told:
        warn(told)


TURBO_BECAUSE = "its turbo_config gathers parameters in float16, and verl makes no loss scaler"


@seam(
    f"{TURBO}._build_fsdp_module",
    why="shards the model by its own config, and makes no scaler for the loop that it inherits",
    relies_on=("FSDPTurbo", "turbo_config", "engine_config", "module"),
    **on(TURBO),
)
def build_turbo(call: Call) -> Any:
    """Set a scaler and a float16 autocast on the engine, if FSDP Turbo gathers in float16."""
    engine = call.instance
    module = call.proceed()
    if policy_of(module) is torch.float16:
        engine._autocast_dtype = torch.float16
        if not engine.engine_config.forward_only:
            make(engine, None, TURBO_BECAUSE)
    else:
        tell_unscaled(engine.engine_config, policy_of(module))
    return module


def _follow(symbol: Symbol, settings: Any) -> str | None:
    return "the optimizer's states and the reduction's dtype follow the engine's own config"


NATIVE = tuple(
    Seam(
        target=f"{engine}.initialize",
        feature=feature,
        wrapper=None,
        group=GROUPS[engine],
        why="torch's AdamW keeps its states in its parameters' dtype; there is no Megatron bucket",
        native=_follow,
        optional=True,
    )
    for engine in (VEOMNI, AUTOMODEL, TITAN)
    for feature in ("bf16-dispatch", "grad-bucket-alignment")
)
"""Seams that report to ``status()`` that engines without Megatron choose their own dtypes."""


REFUSED = {
    VEOMNI: "its VeOmni engine makes no loss scaler, and the VeOmni that it works with gathers "
    "parameters in bfloat16, by name in its code",
    TITAN: "its torchtitan engine makes no loss scaler, and no torchtitan that it works with was "
    "released; the shim scales that of torchtitan 0.3.0",
}
"""Maps an engine to the reason for refusing fp16 if a condition in ``SINCE`` does not hold."""


def refusal(engine: str) -> str:
    """Why an engine of the installed verl cannot train in float16; empty if it can."""
    return "" if all(map(is_there, SINCE[engine])) else REFUSED.get(engine, "")


FLAGGED = {"veomni": VEOMNI, "torchtitan": TITAN}
"""Maps a strategy to its engine, which computes in float16 or bfloat16, as ``dtype`` says."""


def of_flag(strategy: str, config: Any) -> tuple[torch.dtype, str]:
    """The dtype in which an engine of ``FLAGGED`` computes, and why it is not the float16 asked."""
    if not is_fp16(read_key(config, "dtype")):
        return torch.bfloat16, ""
    why = refusal(FLAGGED[strategy])
    return (torch.bfloat16 if why else torch.float16), why


def turbo_plan(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of an FSDP engine's config from which FSDP Turbo reads its dtypes."""
    found: Any = config
    for name in ("turbo_config", "distributed", "fsdp_plan"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


@seam(
    feature=FEATURE,
    at=[
        {
            "target": f"{engine}.__init__",
            "group": GROUPS[engine],
            "refusal": why,
            "unless": SINCE[engine],
        }
        for engine, why in REFUSED.items()
    ],
    why="says so where fp16 is asked of the engine, before it builds an optimizer",
    delete_when="verl 0.9.0 is the oldest in use",
    optional=True,
)
def refuse_fp16(call: Call, engine_config: Any) -> Any:
    """Warn (strict: raise) if an engine whose loss the shim cannot scale is set to float16."""
    if not any(fp16_keys(engine_config)) or engine_config.forward_only:
        return call.proceed()
    kinds = {base.__name__ for base in type(call.instance).__mro__}
    reason = next(why for refused, why in REFUSED.items() if refused.rpartition(":")[2] in kinds)
    message = (
        f"{versioned('verl')}: {reason}. It trains in bfloat16 whatever dtype says, and the shim "
        "cannot scale its loss. Train in bfloat16, or in float16 with the fsdp2, fsdp or megatron "
        "engine, or with verl 0.9.1."
    )
    if current_settings().strict:
        raise UnsupportedPrecisionError(message)
    decide("verl", type(call.instance).__name__, FEATURE, "left as it is", reason)
    warn(message)
    return call.proceed()
