"""Engines of verl that a feature does not support: warn, or raise in strict mode, at their use."""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, collect, current_settings, decide, seam, version_of, warn
from precision_shim.errors import UnsupportedPrecisionError

from ..fp16 import FEATURE
from .fsdp import asks_fp16

_WHY = "says so where the engine is used, instead of leaving a silent gap"
_WHY_FP16 = "says so where fp16 is asked of the engine, instead of training unscaled"
_WHEN = "the engine is supported"
_STATES = ("bf16-dispatch", "grad-bucket-alignment")
_IMPL = "verl.workers.engine"


@seam(
    feature=FEATURE,
    at=[
        {
            "target": f"{_IMPL}.veomni.transformer_impl:VeOmniEngine.initialize",
            "group": "veomni engine",
            "refusal": "verl's veomni engine takes no float16: it trains in bfloat16 or float32 "
            "with bfloat16, and its optimizer step knows no loss scaler",
        },
        {
            "target": f"{_IMPL}.fsdp.fsdp_turbo_impl:FSDPTurboEngineWithLMHead._build_fsdp_module",
            "group": "fsdp_turbo engine",
            "refusal": "verl's fsdp_turbo engine shards the model by its own turbo_config, "
            "under a bfloat16 autocast, and makes no loss scaler",
        },
        {
            "target": f"{_IMPL}.torchtitan.transformer_impl:TorchTitanEngine.initialize",
            "group": "torchtitan engine",
            "refusal": "verl's torchtitan engine runs its forward under a bfloat16 autocast and "
            "steps without a loss scaler",
        },
        {
            "target": f"{_IMPL}.automodel.transformer_impl:AutomodelEngine.initialize",
            "group": "automodel engine",
            "refusal": "verl's automodel engine runs its forward under a bfloat16 autocast and "
            "steps without a loss scaler",
        },
    ],
    why=_WHY_FP16,
    delete_when=_WHEN,
    optional=True,
)
def refuse_fp16(call: Call) -> Any:
    """Warn (strict: raise) where the config asks one of these engines for float16."""
    config = getattr(call.instance, "engine_config", None)
    if not asks_fp16(config) or getattr(config, "forward_only", False):
        return call.proceed()
    kinds = _kinds(call.instance)
    reason = next(
        one.refusal for one in collect(refuse_fp16) if one.attribute.split(".")[0] in kinds
    )
    message = (
        f"verl {version_of('verl', ('verl',))}: {reason}; the shim cannot scale its loss. Train "
        "in bfloat16, or in float16 with the fsdp2, fsdp or megatron engine."
    )
    _leave(call.instance, FEATURE, reason, message)
    return call.proceed()


@seam(
    feature=_STATES,
    at=[
        {
            "target": f"{_IMPL}.torchtitan.transformer_impl:TorchTitanEngine.initialize",
            "group": "torchtitan engine",
            "refusal": "verl's torchtitan engine builds torchtitan's own optimizer, whose "
            "states follow its parameters",
        },
        {
            "target": f"{_IMPL}.automodel.transformer_impl:AutomodelEngine.initialize",
            "group": "automodel engine",
            "refusal": "verl's automodel engine builds its optimizer from its own dtype strings "
            "(optimizer_config.exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype)",
        },
    ],
    why=_WHY,
    delete_when=_WHEN,
    optional=True,
)
def refuse(call: Call) -> Any:
    """Warn (strict: raise) that the shim does nothing for this engine, and run it unchanged."""
    kinds = _kinds(call.instance)
    reasons = {
        one.refusal: one.feature
        for one in collect(refuse)
        if one.attribute.split(".")[0] in kinds and one.feature in current_settings().features
    }
    for reason, feature in reasons.items():
        message = (
            f"verl {version_of('verl', ('verl',))}: {reason}; the shim leaves it as it is. Set "
            "the dtypes in the engine's own config, or use the megatron engine."
        )
        _leave(call.instance, feature, reason, message)
    return call.proceed()


def _kinds(engine: Any) -> set[str]:
    return {one.__name__ for one in type(engine).__mro__}


def _leave(engine: Any, feature: str, reason: str, message: str) -> None:
    if current_settings().strict:
        raise UnsupportedPrecisionError(message)
    decide("verl", type(engine).__name__, feature, "left as it is", reason)
    warn(message)
