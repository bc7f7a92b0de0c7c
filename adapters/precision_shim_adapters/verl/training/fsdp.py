"""Replace verl's loss scaler on FSDP in fp16, and read verl's FSDP configs.

verl 0.8 and later make a grad scaler in ``FSDPEngine._build_fsdp_module``, and 0.7.1 in the legacy
actor. The shim replaces it by a ``LossScaler`` with its settings. The FSDP engine and the legacy
critic of 0.7.1 train fp16 parameters without a scaler. There the shim itself scales the loss, and
unscales the gradients before verl clips them; verl skips a step whose grad norm is not finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from precision_shim.adapting import Call, Symbol, look, seam, versioned, warn
from precision_shim.errors import DtypeError
from precision_shim.precision.dtypes import parse_dtype
from precision_shim.precision.effect import COMPUTES, REDUCES, Written, names_precision, values_of
from precision_shim.scaling.record import ScalerSettings

from ... import torch_fp16
from ...torch_fp16 import FEATURE
from ...torch_fp16.names import own_dtype, unscaled

SHARDED = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine"
ACTOR = "verl.workers.actor.dp_actor:DataParallelPPOActor"
CRITIC = "verl.workers.critic.dp_critic:DataParallelPPOCritic"

ENGINE, LEGACY = "fsdp engine", "legacy fsdp workers"
"""The groups of the seams on verl's FSDP engine and on verl's legacy FSDP workers."""

WORKERS = "use_legacy_worker_impl"
"""Key in the section ``trainer`` of verl 0.7; its value selects the engine or legacy workers."""

_SCALER = "scaler"
"""Name of the attribute with the scaler, on verl's engines and on 0.7.1's actor."""

VERLS_SCALER = ScalerSettings()
"""The settings of verl's own scaler: torch's defaults, and a growth interval of 400."""

OWN_SCALER = "verl's own scaler, counted and kept with the checkpoints"
"""Why the shim scales the loss where verl would do it itself."""


def no_legacy_workers(symbol: Symbol, settings: Any) -> str | None:
    """Return a reason to skip the seam in verl 0.8 and later, which has no legacy workers."""
    critic = look(f"{CRITIC}.update_critic")
    return None if critic.found else "this version has no legacy FSDP workers"


def group_of(asked: object = None) -> str:
    """The group of the seams on a PPO job; ``asked`` is its ``use_legacy_worker_impl``, if any."""
    legacy = look(f"{CRITIC}.update_critic").found
    return LEGACY if legacy and asked != "disable" else ENGINE


ON_ENGINE: dict[str, Any] = {"feature": FEATURE, "group": ENGINE, "optional": True}
"""Arguments that all seams on verl's FSDP engine share."""

ON_LEGACY: dict[str, Any] = {
    "feature": FEATURE,
    "group": LEGACY,
    "delete_when": "verl 0.8 is the oldest in use",
    "optional": True,
}
"""Arguments that all seams on verl 0.7.1's default workers share."""


@seam(
    f"{SHARDED}._build_fsdp_module",
    why="where verl >= 0.8 makes its scaler, and 0.7.1 none",
    delete_when="verl's scaler takes settings and counts skipped steps",
    relies_on=("engine_config", "mixed_precision", "param_dtype"),
    **ON_ENGINE,
)
def build_engine(call: Call) -> Any:
    """Set the shim's scaler on the engine, in place of verl's own scaler if there is one."""
    engine, config = call.instance, call.instance.engine_config
    module = call.proceed()
    if not config.forward_only:  # a reference model takes no step
        _scale(engine, config, "its FSDP engine")
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
    config = call.instance.engine_config
    model_dtype(config)
    mixed_dtypes(config)
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
    config = read_key(actor.config, "fsdp_config")
    if actor.scaler is not None:
        _replace_scaler(actor)
    elif config is not None and computed(config, actor.param_dtype) is torch.float16:
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
    config = read_key(read_key(critic.config, "model"), "fsdp_config")
    if critic.critic_optimizer is not None and config is not None:
        _scale(critic, config, "its legacy critic")
        keep_at_optimizer(critic)
    return result


def _scale(owner: Any, config: Any, where: str) -> None:
    if getattr(owner, _SCALER, None) is not None:
        _replace_scaler(owner)
    elif computed(config) is torch.float16:
        make(owner, None, f"fp16 parameters, and {where} has no scaler", drives=True)
        _tell_autocast(where, "verl 0.8 and later compute in float16")
    strategy = read_key(config, "strategy") or "fsdp"
    if message := find_unscaled(config, strategy, computed(config)):
        warn(message)


def _replace_scaler(owner: Any) -> None:
    if type(owner.scaler) is ShardedGradScaler:  # keep the user's own subclass
        make(owner, owner.scaler, OWN_SCALER)


def scaled_because() -> str:
    """Why the shim scales the loss of an fp16 model, as the command ``plan`` reports it."""
    made = look(f"{SHARDED}._build_fsdp_module")
    return OWN_SCALER if "ShardedGradScaler" in made.names else "fp16 parameters"


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


def config_of(owner: Any) -> Any:
    """The config of an engine, or the ``fsdp_config`` of a legacy actor or critic."""
    own = getattr(owner, "config", None)
    legacy = read_key(own, "fsdp_config") or read_key(read_key(own, "model"), "fsdp_config")
    return getattr(owner, "engine_config", legacy)


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


def fp16_keys(config: Any) -> Iterator[str]:
    """Yield the dtype keys of an engine's config that name float16."""
    for key, value in values_of(config):
        if "dtype" in key.rpartition(".")[2] and parse_dtype(str(value)) is torch.float16:
            yield key


MIXED = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
"""The keys of ``mixed_precision`` that verl reads, and verl's defaults."""

COMPUTE_KEYS = {
    "fsdp": "mixed_precision.param_dtype",
    "fsdp2": "mixed_precision.param_dtype",
    "fsdp_turbo": "turbo_config.distributed.fsdp_plan.param_dtype",
    "automodel": "mp_param_dtype",
}
"""Maps an engine to the key from which it takes the dtype of its computation; other engines have
no key, or ``dtype``."""

_DEFAULTS = {
    "dtype": ("bfloat16", COMPUTES),
    "model_dtype": ("fp32", "params"),
    "mp_param_dtype": ("bf16", COMPUTES),
    "mp_reduce_dtype": ("fp32", REDUCES),
    "param_dtype": ("bf16", COMPUTES),
    "reduce_dtype": ("fp32", REDUCES),
    "output_dtype": ("bf16", ""),
}
"""Maps a dtype key to verl's default and to what the key sets."""
_UNREAD = {"wrap_policy": "", "turbo_config": "fsdp_turbo"}
"""Maps a section to the engine that reads dtypes there."""


def mixed_dtypes(config: Any, section: str = "fsdp_config") -> dict[str, torch.dtype]:
    """Map the keys of ``mixed_precision`` to the dtypes that verl passes to FSDP; may be empty.

    ``section`` is the section's key in the job's config, for error messages.

    Raises:
        DtypeError: verl does not accept a dtype name; verl's own error would not name the key.
    """
    mixed, place = read_key(config, "mixed_precision"), f"{section}.mixed_precision"
    if mixed is None:
        return {}
    if not hasattr(mixed, "get"):
        raise DtypeError(
            f"{versioned('verl')}: {place}={mixed!r} is no section; allowed: the keys "
            f"{', '.join(MIXED)}, such as mixed_precision: {{param_dtype: bf16}}. Correct {place}.",
            key=place,
        )
    return {
        key: own_dtype(mixed.get(key, default), f"{place}.{key}", versioned("verl"))
        for key, default in MIXED.items()
    }


def model_dtype(config: Any, section: str = "fsdp_config") -> torch.dtype:
    """The dtype in which the parameters are stored.

    Raises:
        DtypeError: verl does not accept the dtype name.
    """
    value = read_key(config, "model_dtype")
    if value is None:
        return torch.bfloat16 if read_key(config, "forward_only") else torch.float32
    return own_dtype(value, f"{section}.model_dtype", versioned("verl"))


def computed(
    config: Any, default: torch.dtype = torch.bfloat16, section: str = "fsdp_config"
) -> torch.dtype:
    """The dtype in which FSDP computes, which verl reads from ``mixed_precision.param_dtype``."""
    return mixed_dtypes(config, section).get("param_dtype", default)


def of_legacy_actor(config: Any, mixed: torch.dtype, section: str = "fsdp_config") -> torch.dtype:
    """The dtype in which 0.7.1's actor trains: fp16 if ``dtype`` or ``mixed`` is fp16.

    ``mixed`` is ``mixed_precision.param_dtype``, or its default.

    Raises:
        DtypeError: verl does not accept the name in ``dtype``.
    """
    value = read_key(config, "dtype") or "bfloat16"
    own = own_dtype(value, f"{section}.dtype", versioned("verl"))
    if torch.float16 in (own, mixed):
        return torch.float16
    return own if read_key(config, "mixed_precision") is None else mixed


def of_legacy_autocast(config: Any, section: str = "fsdp_config") -> torch.dtype:
    """The dtype of the matrix products of 0.7.1's actor and reference model.

    An autocast to fp32 has no effect, so the products have the dtype of FSDP's parameters.

    Raises:
        DtypeError: verl does not accept a dtype name.
    """
    value = read_key(config, "dtype") or "bfloat16"
    own = own_dtype(value, f"{section}.dtype", versioned("verl"))
    return computed(config, own, section) if own is torch.float32 else own


def written(
    config: Any, strategy: str, section: str = "fsdp_config", *, reads_dtype: bool = False
) -> Iterator[Written]:
    """Yield the dtype keys of the config of an engine that is not Megatron's.

    ``section`` is the config's key in the job's config. A value of ``_DEFAULTS`` may be verl's
    default, and does not count as written. ``reads_dtype``: of 0.7.1's legacy workers, whose
    autocast has the dtype ``dtype``, except for the critic.
    """
    for key, value in values_of(config):
        (top, *_), name = key.split("."), key.rpartition(".")[2]
        default, sets = _DEFAULTS.get(name, (None, ""))
        if top == "mixed_precision":
            # FSDP2 has no dtype of buffers, and leaves them in fp32.
            in_fp32 = strategy == "fsdp" or parse_dtype(str(value)) is torch.float32
            counts = key != top and not (name == "buffer_dtype" and in_fp32)
        else:
            own = key in _DEFAULTS and not (reads_dtype and key == "dtype")
            unread = names_precision(name, value) and _UNREAD.get(top, strategy) != strategy
            counts = (own or unread) and value not in (None, default)
        if counts:
            right = _place_of(name, sets, strategy)
            one = Written(f"{section}.{key}", value, sets)
            needs = f"{section}.{right}={one.dtype or value}" if right not in ("", key) else ""
            yield replace(one, needs=needs)


def _place_of(name: str, sets: str, strategy: str) -> str:
    """The key from which an engine reads what a dtype key's name says; empty if there is none."""
    if name.startswith(("model_", "mp_")):
        return name
    if sets == COMPUTES:
        return COMPUTE_KEYS.get(strategy, "")
    near = get_close_matches(name, MIXED, n=1, cutoff=0.65)
    return f"mixed_precision.{near[0]}" if near and strategy in ("fsdp", "fsdp2") else ""


def find_unscaled(config: Any, strategy: str, computes: torch.dtype | None) -> str:
    """Return a warning about float16 in parameters or reductions if the loss is not scaled."""
    asked = [
        one.key.partition(".")[2]
        for one in written(config, strategy)
        if one.dtype == "fp16" and one.sets in ("params", REDUCES) and not one.needs
    ]
    return unscaled(versioned("verl"), asked, computes, COMPUTE_KEYS.get(strategy, "dtype"))


def read_key(config: Any, key: str, default: Any = None) -> Any:
    """Read a key of a verl config: a dataclass, an OmegaConf node, a dict, or ``None``."""
    get = getattr(config, "get", None)
    return get(key, default) if get is not None else getattr(config, key, default)


def subject_of(owner: Any) -> str:
    """``"actor"`` or ``"critic"``: the model of an engine, or of a legacy actor or critic."""
    kind = getattr(getattr(owner, "model_config", None), "model_type", "")
    return "critic" if kind == "value_model" or hasattr(owner, "critic_optimizer") else "actor"


def _tell_autocast(where: str, otherwise: str) -> None:
    warn(
        f"{versioned('verl')}: mixed_precision.param_dtype=float16, but {where} runs the forward "
        "pass under a bfloat16 autocast: parameters are gathered, and gradients come, in float16, "
        f"and the shim scales the loss for them; the matrix products are in bfloat16 ({otherwise})."
    )
