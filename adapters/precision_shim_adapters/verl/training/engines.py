"""What verl's VeOmni, Automodel, torchtitan and FSDP Turbo engines share in float16.

Only FSDP Turbo runs the FSDP engine's loop, which uses the engine's ``scaler``.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch

from precision_shim.adapting import (
    Call,
    Seam,
    Symbol,
    current_settings,
    decide,
    seam,
    versioned,
    warn,
)
from precision_shim.adapting.dtypes import values_of
from precision_shim.errors import UnsupportedPrecisionError

from ...torch_fp16 import FEATURE
from ..config import AUTOMODEL, TITAN, TURBO, VEOMNI, TrainingEngine, is_fp16, of_worker
from .fsdp import make, tell_unscaled


def on(engine: TrainingEngine) -> dict[str, Any]:
    """The arguments that all seams for fp16 on one engine share."""
    return {
        "feature": FEATURE,
        "group": engine.group,
        "delete_when": "the engine scales fp16 losses",
        "optional": True,
        "only_if": engine.since,
    }


IN_FP16: ContextVar[bool] = ContextVar("precision_shim_verl_in_fp16", default=False)
"""Whether the model that VeOmni or torchtitan is building will compute in float16."""


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
            make(engine, None, TURBO.because)
    else:
        tell_unscaled(of_worker(engine), policy_of(module))
    return module


def _follow(symbol: Symbol, settings: Any) -> str | None:
    return "the optimizer's states and the reduction's dtype follow the engine's own config"


NATIVE = tuple(
    Seam(
        target=f"{engine}.initialize",
        feature=feature,
        wrapper=None,
        group=engine.group,
        why="torch's AdamW keeps its states in its parameters' dtype; there is no Megatron bucket",
        native=_follow,
        optional=True,
    )
    for engine in (VEOMNI, AUTOMODEL, TITAN)
    for feature in ("bf16-dispatch", "grad-bucket-alignment")
)
"""Seams that report to ``status()`` that engines without Megatron choose their own dtypes."""


@seam(
    feature=FEATURE,
    at=[
        {
            "target": f"{engine}.__init__",
            "group": engine.group,
            "refusal": engine.refused,
            "unless": engine.since,
        }
        for engine in (VEOMNI, TITAN)
    ],
    why="says so where fp16 is asked of the engine, before it builds an optimizer",
    delete_when="verl 0.9.0 is the oldest in use",
    optional=True,
)
def refuse_fp16(call: Call, engine_config: Any) -> Any:
    """Warn (strict: raise) if an engine whose loss the shim cannot scale is set to float16."""
    asked = (key for key, value in values_of(engine_config) if is_fp16(value))
    if engine_config.forward_only or not any("dtype" in key.rpartition(".")[2] for key in asked):
        return call.proceed()
    kinds = {base.__name__ for base in type(call.instance).__mro__}
    reason = (VEOMNI if "VeOmniEngine" in kinds else TITAN).refused
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
