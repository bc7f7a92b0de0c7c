"""verl on FSDP in fp16: the scaler made, driven, reported and kept with the checkpoints.

verl makes a grad scaler in two places: from 0.8 in ``FSDPEngine._build_fsdp_module``, in 0.7 and
before in the legacy actor. Those become a ``LossScaler`` with verl's own values. 0.7.1's FSDP
engine and its legacy critic train fp16 parameters with none: there the shim scales the loss where
it is formed, unscales before verl clips, and lets verl's own look at the grad norm skip the step.

Checkpoints of an engine are entered at the engine, which holds the scaler. Those of the legacy
workers are entered at the checkpoint manager, one place for actor and critic, with the optimizer
telling which scaler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from precision_shim.adapting import Call, NativeProbe, Symbol, look, seam, version_of, warn
from precision_shim.rules.dtypes import parse_dtype
from precision_shim.scaling import FILE_NAME, LossScaler, ScalerSettings

from .. import loss_scaling

_SHARDED = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine"
_MANAGER = "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager"
_ACTOR = "verl.workers.actor.dp_actor:DataParallelPPOActor"
_CRITIC = "verl.workers.critic.dp_critic:DataParallelPPOCritic"
_Wrapper = TypeVar("_Wrapper", bound=Callable[..., Any])

_driven: weakref.WeakSet[LossScaler] = weakref.WeakSet()
"""Scalers of loops that know none: the shim scales, unscales and updates around them."""

_legacy: weakref.WeakKeyDictionary[torch.optim.Optimizer, GradScaler] = weakref.WeakKeyDictionary()
"""Scalers of the legacy workers' optimizers."""

_critic: ContextVar[LossScaler | None] = ContextVar("precision_shim_verl_critic", default=None)
"""The scaler of the legacy critic that is being updated."""

_CONTENTS = ("optimizer", "extra")
"""Parts of verl's checkpoints that the scaler goes with."""


# -- what verl does itself ---------------------------------------------------------------------


def native_loop(symbol: Symbol, settings: Any) -> str | None:
    """verl >= 0.8 scales in its engine's own loop."""
    return "verl scales the loss in its own loop" if "scaler" in symbol.names else None


def native_checkpoint(symbol: Symbol, settings: Any) -> str | None:
    """No version of verl keeps the scaler yet; one that does names it in its manager."""
    manager = look(
        "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.save_checkpoint"
    )
    return "verl keeps the scaler in its checkpoints" if "scaler" in manager.names else None


def no_legacy_workers(symbol: Symbol, settings: Any) -> str | None:
    """verl >= 0.8 has engines only."""
    critic = look("verl.workers.critic.dp_critic:DataParallelPPOCritic.update_critic")
    return None if critic.found else "this version has no legacy FSDP workers"


def _engine(
    method: str, why: str, delete_when: str, *relies_on: str, native: NativeProbe | None = None
) -> Callable[[_Wrapper], _Wrapper]:
    """A seam of the engine: up to 0.7.1 it knows no scaler, later it makes one of torch's."""
    return seam(
        f"{_SHARDED}.{method}",
        loss_scaling.FEATURE,
        group="fsdp engine",
        why=why,
        delete_when=delete_when,
        relies_on=relies_on,
        native=native,
        optional=True,
    )


def _legacy_worker(
    target: str, why: str, *relies_on: str, native: NativeProbe | None = None
) -> Callable[[_Wrapper], _Wrapper]:
    """A seam of 0.7.1's default workers."""
    return seam(
        target,
        loss_scaling.FEATURE,
        group="legacy fsdp workers",
        why=why,
        delete_when="verl 0.8 is the oldest in use",
        relies_on=relies_on,
        native=native,
        optional=True,
    )


# -- the scaler --------------------------------------------------------------------------------


@_engine(
    "_build_fsdp_module",
    "where verl >= 0.8 makes its scaler, and 0.7.1 none",
    "verl's scaler takes settings and counts skipped steps",
    "engine_config",
    "mixed_precision",
    "param_dtype",
)
def build_engine(call: Call) -> Any:
    """Put our scaler where verl made one or nobody did, as the engine wraps its module."""
    module = call.proceed()
    engine = call.instance
    config = engine.engine_config
    if getattr(config, "forward_only", False):  # a reference model takes no step
        return module
    own = getattr(engine, "scaler", None)
    if own is not None:
        engine.scaler = _instead_of(own, _subject(engine))
    elif _mixed(config, torch.bfloat16) is torch.float16:
        engine.scaler = _where_none_was(_subject(engine), "its FSDP engine")
    else:
        _tell_unscaled(config, _mixed(config, torch.bfloat16))
    return module


@_legacy_worker(
    f"{_ACTOR}.__init__",
    "where the legacy actor's scaler is made",
    "scaler",
    "ShardedGradScaler",
    "param_dtype",
    "fsdp_config",
)
def build_actor(call: Call) -> Any:
    """Put our scaler into 0.7.1's actor; the reference policy, of the same class, steps nothing."""
    result = call.proceed()
    actor = call.instance
    if actor.actor_optimizer is None:
        return result
    own = actor.scaler
    config = _get(actor.config, "fsdp_config")
    if own is not None:
        actor.scaler = _instead_of(own, "actor")
    elif config is not None and _mixed(config, actor.param_dtype) is torch.float16:
        # The loop is ready for a scaler: verl looks at another key to make one.
        actor.scaler = _make("actor", None, "fp16 parameters that verl makes no scaler for")
        _tell_autocast("its legacy actor", "fsdp_config.dtype is not float16: set it too")
    if actor.scaler is not None:
        _legacy[actor.actor_optimizer] = actor.scaler
    return result


@_legacy_worker(
    f"{_CRITIC}.__init__",
    "the legacy critic trains fp16 parameters without a scaler",
    "critic_optimizer",
)
def build_critic(call: Call) -> Any:
    """Give 0.7.1's critic a scaler."""
    result = call.proceed()
    critic = call.instance
    config = _get(_get(critic.config, "model"), "fsdp_config")
    if critic.critic_optimizer is not None and config is not None:
        if _mixed(config, torch.bfloat16) is torch.float16:
            critic.scaler = _where_none_was("critic", "its legacy critic")
            _legacy[critic.critic_optimizer] = critic.scaler
        else:
            _tell_unscaled(config, _mixed(config, torch.bfloat16))
    return result


def _instead_of(own: Any, subject: str) -> Any:
    if type(own) is not ShardedGradScaler:  # a subclass's own choice
        return own
    return _make(subject, own, "verl's own scaler, counted and kept with the checkpoints")


def _where_none_was(subject: str, where: str) -> LossScaler:
    scaler = _make(subject, None, f"fp16 parameters, and {where} has no scaler")
    _driven.add(scaler)
    _tell_autocast(where, "verl 0.8 and later compute in float16")
    return scaler


def _make(subject: str, own: ShardedGradScaler | None, because: str) -> LossScaler:
    from verl.utils.device import get_device_name

    verls = ScalerSettings()  # as verl makes it; torch turns its scaler off without an accelerator
    if own is not None and own.is_enabled():
        verls = ScalerSettings(
            init_scale=own.get_scale(),
            growth_interval=own.get_growth_interval(),
            growth_factor=own.get_growth_factor(),
            backoff_factor=own.get_backoff_factor(),
        )
    return loss_scaling.make_scaler(
        "verl",
        subject,
        device=get_device_name(),
        because=because,
        framework_default=verls,
        process_group=own.process_group if own is not None and own.is_enabled() else None,
    )


# -- loops that know no scaler -----------------------------------------------------------------


@_engine(
    "forward_backward_batch",
    "0.7.1's loop knows no scaler: its loss comes from this argument",
    "verl >= 0.8 is the oldest in use",
    "backward",
    native=native_loop,
)
def scale_engine_loss(call: Call, loss_function: Any, forward_only: Any) -> Any:
    """Scale the loss where it is made, for each micro-batch of 0.7.1's engine."""
    scaler = _driven_by_us(call.instance)
    if scaler is not None and loss_function is not None and not forward_only:
        call.arguments["loss_function"] = _scaled(loss_function, scaler)
    return call.proceed()


@_legacy_worker(f"{_ACTOR}.update_policy", "its dict of metrics", "scaler", "actor_optimizer")
def update_policy(call: Call) -> Any:
    """Add the scaler's figures to what an update of 0.7.1's actor returns."""
    actor = call.instance
    if actor.scaler is not None:  # one that was made before a late install() too
        _legacy[actor.actor_optimizer] = actor.scaler
    found = call.proceed()
    found.update(loss_scaling.metrics(actor.scaler, "actor/"))
    return found


@_legacy_worker(
    f"{_CRITIC}.update_critic",
    "tells whose loss is being made; its dict of metrics",
    "compute_value_loss",
    "backward",
    "_optimizer_step",
)
def update_critic(call: Call) -> Any:
    """Note whose losses ``compute_value_loss`` makes; add the figures of 0.7.1's critic."""
    scaler = _driven_by_us(call.instance)
    token = _critic.set(scaler)
    try:
        found = call.proceed()
    finally:
        _critic.reset(token)
    found.update(loss_scaling.metrics(scaler, "critic/"))
    return found


@_legacy_worker(
    "verl.trainer.ppo.core_algos:compute_value_loss",
    "the loss of the legacy critic, before its backward",
    native=no_legacy_workers,
)
def scale_value_loss(call: Call) -> Any:
    """Scale the loss that 0.7.1's critic goes back through."""
    found = call.proceed()
    scaler = _critic.get()
    if scaler is not None:
        scaler.attach(found[0])
    return found


@_engine(
    "optimizer_step",
    "a skipped step has grad norm NaN; around 0.7.1's, which unscales nothing, the rest of the "
    "scaler's work",
    "verl reports skipped steps",
    "optimizer",
    "isfinite",
)
@_legacy_worker(
    f"{_ACTOR}._optimizer_step",
    "a skipped step has grad norm NaN",
    "scaler",
    "actor_optimizer",
)
@_legacy_worker(
    f"{_CRITIC}._optimizer_step",
    "unscale before its clipping, update after its step",
    "critic_optimizer",
    "isfinite",
)
def step(call: Call) -> Any:
    """Return NaN for a step that was skipped; do the scaler's work where verl knows none.

    verl returns the norm of the gradients as they were found, which may be inf as well as NaN.
    """
    scaler = getattr(call.instance, "scaler", None)
    if not isinstance(scaler, LossScaler):
        return call.proceed()
    if scaler not in _driven:
        norm = call.proceed()
    else:
        optimizer = _optimizer(call.instance)
        scaler.unscale_once(optimizer)
        norm = call.proceed()  # verl itself skips when the norm is not finite
        scaler.settle(optimizer)
    if not scaler.counter.in_row:
        return norm
    return torch.full_like(norm, math.nan) if isinstance(norm, torch.Tensor) else math.nan


def _scaled(function: Callable[..., Any], scaler: LossScaler) -> Callable[..., Any]:
    def scaled(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        scaler.attach(found[0])
        return found

    return scaled


def _driven_by_us(instance: Any) -> LossScaler | None:
    scaler = getattr(instance, "scaler", None)
    return scaler if isinstance(scaler, LossScaler) and scaler in _driven else None


def _optimizer(instance: Any) -> torch.optim.Optimizer:
    for name in ("optimizer", "critic_optimizer", "actor_optimizer"):
        found = getattr(instance, name, None)
        if isinstance(found, torch.optim.Optimizer):
            return found
    raise AttributeError(f"{type(instance).__name__} has no optimizer")


# -- checkpoints -------------------------------------------------------------------------------


_KEPT = "the engine has the scaler, verl's manager has not"
_KEEPS = "verl keeps the scaler in its checkpoints"
_BOTH = "one place for actor and critic; its optimizer tells which scaler"


@_engine("save_checkpoint", _KEPT, _KEEPS, "checkpoint_manager", native=native_checkpoint)
def save_engine(call: Call, local_path: Any) -> Any:
    """Write the scaler's state beside what an engine saves."""
    engine = call.instance
    return _save(call, local_path, engine.checkpoint_manager, getattr(engine, "scaler", None))


@_engine("load_checkpoint", _KEPT, _KEEPS, "checkpoint_manager", native=native_checkpoint)
def load_engine(call: Call, local_path: Any, del_local_after_load: Any = False) -> Any:
    """Restore the scaler from beside what an engine loads."""
    engine, scaler = call.instance, getattr(call.instance, "scaler", None)
    manager, subject = engine.checkpoint_manager, _subject(engine)
    result = call.proceed()
    _restore(local_path, del_local_after_load, manager, scaler, subject=subject)
    return result


@_legacy_worker(f"{_MANAGER}.save_checkpoint", _BOTH, "optimizer", native=no_legacy_workers)
def save_manager(call: Call, local_path: Any) -> Any:
    """Write the scaler's state beside what a legacy worker saves."""
    return _save(call, local_path, call.instance, _scaler_of(call.instance.optimizer))


@_legacy_worker(f"{_MANAGER}.load_checkpoint", _BOTH, "optimizer", native=no_legacy_workers)
def load_manager(call: Call, local_path: Any, del_local_after_load: Any = False) -> Any:
    """Restore the scaler from beside what a legacy worker loads."""
    scaler = _scaler_of(call.instance.optimizer)
    result = call.proceed()
    _restore(local_path, del_local_after_load, call.instance, scaler, subject="optimizer")
    return result


def _scaler_of(optimizer: Any) -> GradScaler | None:
    return _legacy.get(optimizer) if optimizer is not None else None


def _save(call: Call, path: Any, manager: Any, scaler: Any) -> Any:
    if not _goes_with(manager, path, scaler, manager.checkpoint_save_contents):
        return call.proceed()
    # Before verl's own files: verl removes an older checkpoint as soon as these are written. Into
    # a directory that verl may remove first, to make room, after them.
    again = _saved_before(manager, path)
    if not again:
        loss_scaling.save_scaler("verl", path, scaler)
    result = call.proceed()
    if again:
        loss_scaling.save_scaler("verl", path, scaler)
    return result


def _restore(path: Any, delete: Any, manager: Any, scaler: Any, *, subject: str) -> None:
    # No path: a fresh start.
    if _goes_with(manager, path, scaler, manager.checkpoint_load_contents):
        with _near(path, bool(delete)) as directory:
            loss_scaling.restore_scaler("verl", directory, scaler, subject)


def _saved_before(manager: Any, path: str) -> bool:
    earlier = map(os.path.abspath, getattr(manager, "previous_saved_paths", ()))
    box = [os.path.abspath(path) in earlier]
    if dist.is_initialized() and dist.get_world_size() > 1:  # verl keeps the list on rank 0 only
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _goes_with(manager: Any, path: Any, scaler: Any, contents: Any) -> bool:
    return (
        path is not None
        and manager.optimizer is not None
        and isinstance(scaler, GradScaler)
        and scaler.is_enabled()
        and any(part in contents for part in _CONTENTS)
    )


@contextlib.contextmanager
def _near(path: str, delete: bool) -> Any:
    """The checkpoint's directory; of a remote one rank 0 gets a copy of the scaler's file."""
    from verl.utils.fs import copy_to_local, is_non_local

    if not is_non_local(path) or (dist.is_initialized() and dist.get_rank() != 0):
        yield path
        return
    copied = None
    try:
        copied = copy_to_local(os.path.join(path, FILE_NAME), always_recopy=True)
    except Exception as error:  # whatever the file system's client raises; the others wait for us
        warn(f"{_verl()}: {path}/{FILE_NAME} cannot be copied: {error!r}")
    yield path if copied is None else os.path.dirname(copied)
    if copied is not None and delete:
        with contextlib.suppress(OSError):
            os.remove(copied)


# -- reading verl's configs --------------------------------------------------------------------


def asks_fp16(config: Any) -> bool:
    """Whether an engine's config names float16 for any dtype in it."""
    return any(dtype is torch.float16 for dtype in _dtypes(config).values())


def _dtypes(config: Any) -> dict[str, torch.dtype | None]:
    if dataclasses.is_dataclass(config):
        config = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    found: dict[str, torch.dtype | None] = {}
    for name, value in config.items() if isinstance(config, Mapping) else ():
        if "dtype" in str(name):
            found[str(name)] = parse_dtype(str(value))
        else:
            inner = _dtypes(value)
            found.update({f"{name}.{key}": dtype for key, dtype in inner.items()})
    return found


def _mixed(config: Any, default: torch.dtype) -> torch.dtype | None:
    """The dtype that FSDP computes in: verl reads it from ``mixed_precision.param_dtype``."""
    mixed = _get(config, "mixed_precision")
    return default if mixed is None else parse_dtype(str(_get(mixed, "param_dtype") or "bf16"))


def _get(config: Any, key: str) -> Any:
    if config is None:
        return None
    return config.get(key) if hasattr(config, "get") else getattr(config, key, None)


def _subject(engine: Any) -> str:
    kind = getattr(engine.model_config, "model_type", "")
    return "critic" if kind == "value_model" else "actor"


def _verl() -> str:
    return f"verl {version_of('verl', ('verl',))}"


def _tell_autocast(where: str, otherwise: str) -> None:
    warn(
        f"{_verl()}: mixed_precision.param_dtype=float16, but {where} runs the forward pass under "
        "a bfloat16 autocast: parameters are gathered, and gradients come, in float16, and the "
        f"shim scales the loss for them; the matrix products are in bfloat16 ({otherwise})."
    )


def _tell_unscaled(config: Any, computed: torch.dtype | None) -> None:
    asked = [name for name, dtype in _dtypes(config).items() if dtype is torch.float16]
    if asked:
        warn(
            f"{_verl()}: {', '.join(asked)}=float16 is no fp16 training here: FSDP takes its "
            f"dtype from mixed_precision.param_dtype, which is {computed}. The loss is not "
            "scaled. Set mixed_precision: {param_dtype: fp16} to train in float16."
        )
