"""What verl does itself in some versions, read from its source: the seams' ``native`` probes.

This module imports no torch, so that ``precision-shim doctor`` need not.
"""

from __future__ import annotations

from precision_shim.adapting import Settings, Symbol, look

CRITIC = "verl.workers.critic.dp_critic:DataParallelPPOCritic"
MANAGER = "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager"


def native_dispatch(symbol: Symbol, settings: Settings) -> str | None:
    """Return a reason to skip the seam in verl 0.9, unless ``optimizer_states=follow-model``."""
    if "bf16" in symbol.parameters and settings["optimizer_states"] != "follow-model":
        return "verl dispatches on the dtype and has the opt-in in its own optimizer config"
    return None


def native_fields(symbol: Symbol, settings: Settings) -> str | None:
    """Return a reason to skip the seam if verl's dataclass has fields for the states' dtypes."""
    if "use_precision_aware_optimizer" in symbol.parameters:
        return "verl's optimizer config has the fields"
    return None


def native_bucket(symbol: Symbol, settings: Settings) -> str | None:
    """Return, as text for ``status()``, how verl 0.9 itself sets the gradient bucket's dtype."""
    if "use_low_precision_main_grads" in symbol.names:  # since 0.9.1
        return (
            "verl aligns the bucket with the fields of its optimizer config; it ignores "
            "override_optimizer_config and the fp16 engine, and the shim aligns the DDP for these"
        )
    return (
        "verl aligns the bucket for the bf16 opt-in only; the shim aligns the DDP for everything "
        "else (Megatron-Bridge's bf16 and fp16 default buckets)"
    )


def native_loop(symbol: Symbol, settings: Settings) -> str | None:
    """Return a reason to skip the seam if verl's loop itself scales the loss (since 0.8)."""
    return "verl scales the loss in its own loop" if "scaler" in symbol.names else None


def native_checkpoint(symbol: Symbol, settings: Settings) -> str | None:
    """Return a reason to skip the seam if verl itself saves a scaler; no version does so yet."""
    manager = look(f"{MANAGER}.save_checkpoint")
    return "verl keeps the scaler in its checkpoints" if "scaler" in manager.names else None


def native_config(symbol: Symbol, settings: Settings) -> str | None:
    """Return, as text for ``status()``, that engines without Megatron choose their own dtypes."""
    return "the optimizer's states and the reduction's dtype follow the engine's own config"


def no_legacy_workers(symbol: Symbol, settings: Settings) -> str | None:
    """Return a reason to skip the seam in verl 0.8 and later, which has no legacy workers."""
    critic = look(f"{CRITIC}.update_critic")
    return None if critic.found else "this version has no legacy FSDP workers"
