"""Replace verl's loss scaler on FSDP in fp16.

verl 0.8 and later make a grad scaler in ``FSDPEngine._build_fsdp_module``, and 0.7.1 in the legacy
actor. The shim replaces it by a ``LossScaler`` with its settings. The FSDP engine and the legacy
critic of 0.7.1 train fp16 parameters without a scaler. There the shim itself scales the loss, and
unscales the gradients before verl clips them; verl skips a step whose grad norm is not finite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from precision_shim.adapting import Call, look, seam, versioned, warn
from precision_shim.adapting.scaling import ScalerSettings

from ... import torch_fp16
from ...torch_fp16 import FEATURE
from ..config import ACTOR, CRITIC, LEGACY, SHARDED, ModelConfig, of_worker, subject_of

_SCALER = "scaler"
"""Name of the attribute with the scaler, on verl's engines and on 0.7.1's actor."""

VERLS_SCALER = ScalerSettings()
"""The settings of verl's scaler: torch's defaults, and a growth interval of 400."""

OWN_SCALER = "verl's own scaler, counted and kept with the checkpoints"
"""Why the shim scales the loss where verl would do it itself."""


ON_ENGINE: dict[str, Any] = {"feature": FEATURE, "group": SHARDED.group, "optional": True}
"""Arguments that all seams on verl's FSDP engine share."""

ON_LEGACY: dict[str, Any] = {
    "feature": FEATURE,
    "group": LEGACY,
    "delete_when": "verl 0.8 is the oldest in use",
    "optional": True,
}
"""Arguments that all seams on verl 0.7.1's default workers share."""

WITH_LEGACY = {**ON_LEGACY, "only_if": (f"{CRITIC}.update_critic",)}
"""Arguments of a seam on a function that later versions have, too."""


@seam(
    f"{SHARDED}._build_fsdp_module",
    why="where verl >= 0.8 makes its scaler, and 0.7.1 none",
    delete_when="verl's scaler takes settings and counts skipped steps",
    relies_on=("engine_config", "mixed_precision", "param_dtype"),
    **ON_ENGINE,
)
def build_engine(call: Call) -> Any:
    """Set the shim's scaler on the engine, in place of verl's scaler if there is one."""
    engine = call.instance
    module = call.proceed()
    if not engine.engine_config.forward_only:  # a reference model takes no step
        _scale(engine, of_worker(engine), "its FSDP engine")
    return module


@seam(
    f"{SHARDED}._build_module",
    why="a name that verl does not know ends in an error without key and allowed names",
    delete_when="verl's PrecisionType names the key",
    relies_on=("engine_config", "model_dtype"),
    **ON_ENGINE,
)
def check_names(call: Call) -> Any:
    """Check the dtype names of the engine's config before verl loads the model.

    Raises:
        DtypeError: verl does not accept a dtype name.
    """
    config = of_worker(call.instance)
    _ = config.stored, config.mixed
    return call.proceed()


@seam(
    f"{ACTOR}.__init__",
    why="where the legacy actor's scaler is made",
    relies_on=("scaler", "ShardedGradScaler", "param_dtype", "fsdp_config"),
    **ON_LEGACY,
)
def build_actor(call: Call) -> Any:
    """Set the shim's scaler on 0.7.1's actor, but not on a reference policy of the same class."""
    result = call.proceed()
    actor = call.instance
    if actor.actor_optimizer is None:
        return result
    if actor.scaler is not None:
        _replace_scaler(actor)
    elif of_worker(actor).mixed.get("param_dtype", actor.param_dtype) is torch.float16:
        # verl makes a scaler only for fsdp_config.dtype=fp16, but the actor's loop takes any scaler
        make(actor, None, "fp16 parameters that verl makes no scaler for")
        _tell_autocast("its legacy actor", "fsdp_config.dtype is not float16: set it too")
    keep_at_optimizer(actor)
    return result


@seam(
    f"{CRITIC}.__init__",
    why="the legacy critic trains fp16 parameters without a scaler",
    **ON_LEGACY,
)
def build_critic(call: Call) -> Any:
    """Set the shim's scaler on 0.7.1's critic."""
    result = call.proceed()
    critic = call.instance
    config = of_worker(critic)
    if critic.critic_optimizer is not None and config.engine is not None:
        _scale(critic, config, "its legacy critic")
        keep_at_optimizer(critic)
    return result


def _scale(owner: Any, config: ModelConfig, where: str) -> None:
    if getattr(owner, _SCALER, None) is not None:
        _replace_scaler(owner)
    elif config.gathered is torch.float16:
        make(owner, None, f"fp16 parameters, and {where} has no scaler", drives=True)
        _tell_autocast(where, "verl 0.8 and later compute in float16")
    tell_unscaled(config, config.gathered)


def tell_unscaled(config: ModelConfig, computes: torch.dtype | None) -> None:
    """Warn if a trained model's parameters or reductions are in float16, and its layers are not."""
    told = "" if config.get("forward_only") else config.unscaled(computes)
    if told:
        warn(told)


def _replace_scaler(owner: Any) -> None:
    if type(owner.scaler) is ShardedGradScaler:  # keep the user's subclass
        make(owner, owner.scaler, OWN_SCALER)


def scaled_because(config: ModelConfig) -> str:
    """Why the shim scales the loss of an fp16 model, as the command ``plan`` reports it."""
    made = look(f"{SHARDED}._build_fsdp_module")
    own = OWN_SCALER if "ShardedGradScaler" in made.names else "fp16 parameters"
    return own if config.sharded else config.kind.because


def make(owner: Any, own: Any, because: str, *, drives: bool = False) -> None:
    """Make a ``ScaledTraining`` and store it on an engine or on a legacy actor or critic.

    The settings of ``own``, verl's scaler if there is one, are the new scaler's defaults. For
    ``because`` and ``drives`` see ``ScaledTraining.make``.
    """
    from verl.utils.device import get_device_name

    verls = VERLS_SCALER  # without an accelerator, torch disables verl's scaler
    on = own is not None and own.is_enabled()
    if on:
        verls = ScalerSettings(
            init_scale=own.get_scale(),
            growth_interval=own.get_growth_interval(),
            growth_factor=own.get_growth_factor(),
            backoff_factor=own.get_backoff_factor(),
        )
    training = torch_fp16.ScaledTraining.make(
        "verl",
        subject_of(owner),
        device=get_device_name(),
        because=because,
        framework_default=verls,
        process_group=own.process_group if on else None,
        drives=drives,
    )
    training.keep(owner, _SCALER)
    step = "optimizer_step" if hasattr(owner, "optimizer_step") else "_optimizer_step"
    training.guard(owner, step, optimizers_of)


def training_of(owner: Any) -> torch_fp16.ScaledTraining | None:
    """The ``ScaledTraining`` of an engine, or of a legacy actor or critic."""
    if getattr(owner, _SCALER, None) is None:
        return None
    return torch_fp16.ScaledTraining.of_attribute(owner, _SCALER, "verl", subject_of(owner))


def keep_at_optimizer(worker: Any) -> None:
    """Store a worker's ``ScaledTraining`` on the optimizer, which the checkpoint manager has."""
    training = training_of(worker)
    if training is not None:
        training.keep(optimizer_of(worker))


def optimizer_of(instance: Any) -> Any:
    """The optimizer of an engine, or of a legacy actor or critic."""
    names = ("optimizer", "critic_optimizer", "actor_optimizer")
    return next((getattr(instance, name) for name in names if hasattr(instance, name)), None)


def optimizers_of(instance: Any) -> tuple[Any, ...]:
    """The optimizers of an engine, or of a legacy actor or critic, instead of their container."""
    optimizer = optimizer_of(instance)
    return inside(optimizer) or (optimizer,)


def inside(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers in VeOmni's or torchtitan's container; empty for a single optimizer."""
    parts = getattr(optimizer, "optimizers_dict", None)
    if parts:
        return tuple(parts.values())
    return tuple(optimizer) if hasattr(optimizer, "__iter__") else ()


def _tell_autocast(where: str, otherwise: str) -> None:
    warn(
        f"{versioned('verl')}: mixed_precision.param_dtype=float16, but {where} runs the forward "
        "pass under a bfloat16 autocast: parameters are gathered, and gradients come, in float16, "
        f"and the shim scales the loss for them; the matrix products are in bfloat16 ({otherwise})."
    )
