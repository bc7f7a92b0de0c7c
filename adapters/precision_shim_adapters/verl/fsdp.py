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
import inspect
import math
import os
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from precision_shim.adapting import Symbol, look, version_of, warn
from precision_shim.rules.dtypes import parse_dtype
from precision_shim.scaling import FILE_NAME, LossScaler, ScalerSettings

from .. import loss_scaling

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


# -- the scaler --------------------------------------------------------------------------------


def build_engine(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``FSDPEngine._build_fsdp_module``: what verl made there, or nobody, becomes ours."""
    module = wrapped(*args, **kwargs)
    config = instance.engine_config
    if getattr(config, "forward_only", False):  # a reference model takes no step
        return module
    own = getattr(instance, "scaler", None)
    if own is not None:
        instance.scaler = _instead_of(own, _subject(instance))
    elif _mixed(config, torch.bfloat16) is torch.float16:
        instance.scaler = _where_none_was(_subject(instance), "its FSDP engine")
    else:
        _tell_unscaled(config, _mixed(config, torch.bfloat16))
    return module


def build_actor(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around 0.7.1's ``DataParallelPPOActor.__init__``, which the reference policy shares."""
    result = wrapped(*args, **kwargs)
    if instance.actor_optimizer is None:
        return result
    own = instance.scaler
    config = _get(instance.config, "fsdp_config")
    if own is not None:
        instance.scaler = _instead_of(own, "actor")
    elif config is not None and _mixed(config, instance.param_dtype) is torch.float16:
        # The loop is ready for a scaler: verl looks at another key to make one.
        instance.scaler = _make("actor", None, "fp16 parameters that verl makes no scaler for")
        _tell_autocast("its legacy actor", "fsdp_config.dtype is not float16: set it too")
    if instance.scaler is not None:
        _legacy[instance.actor_optimizer] = instance.scaler
    return result


def build_critic(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around 0.7.1's ``DataParallelPPOCritic.__init__``, which makes no scaler."""
    result = wrapped(*args, **kwargs)
    config = _get(_get(instance.config, "model"), "fsdp_config")
    if instance.critic_optimizer is not None and config is not None:
        if _mixed(config, torch.bfloat16) is torch.float16:
            instance.scaler = _where_none_was("critic", "its legacy critic")
            _legacy[instance.critic_optimizer] = instance.scaler
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


def scale_engine_loss(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around 0.7.1's ``FSDPEngine.forward_backward_batch``: the loss is scaled where it is made."""
    scaler = _driven_by_us(instance)
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    function = bound.arguments["loss_function"]
    if scaler is None or function is None or bound.arguments["forward_only"]:
        return wrapped(*args, **kwargs)
    bound.arguments["loss_function"] = _scaled(function, scaler)
    return wrapped(*bound.args, **bound.kwargs)


def update_policy(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around 0.7.1's ``DataParallelPPOActor.update_policy``."""
    if instance.scaler is not None:  # one that was made before a late install() too
        _legacy[instance.actor_optimizer] = instance.scaler
    found = wrapped(*args, **kwargs)
    found.update(loss_scaling.metrics(instance.scaler, "actor/"))
    return found


def update_critic(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around 0.7.1's ``DataParallelPPOCritic.update_critic``."""
    scaler = _driven_by_us(instance)
    token = _critic.set(scaler)
    try:
        found = wrapped(*args, **kwargs)
    finally:
        _critic.reset(token)
    found.update(loss_scaling.metrics(scaler, "critic/"))
    return found


def scale_value_loss(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``compute_value_loss``, from which the legacy critic's loss is."""
    found = wrapped(*args, **kwargs)
    scaler = _critic.get()
    if scaler is not None:
        scaler.attach(found[0])
    return found


def step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``optimizer_step`` and ``_optimizer_step``; returns NaN for a step that was skipped.

    verl returns the norm of the gradients as they were found, which may be inf as well as NaN.
    """
    scaler = getattr(instance, "scaler", None)
    if not isinstance(scaler, LossScaler):
        return wrapped(*args, **kwargs)
    if scaler not in _driven:
        norm = wrapped(*args, **kwargs)
    else:
        optimizer = _optimizer(instance)
        scaler.unscale_once(optimizer)
        norm = wrapped(*args, **kwargs)  # verl itself skips when the norm is not finite
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


def save_engine(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``FSDPEngine.save_checkpoint``."""
    scaler = getattr(instance, "scaler", None)
    return _save(wrapped, args, kwargs, instance.checkpoint_manager, scaler)


def load_engine(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``FSDPEngine.load_checkpoint``."""
    scaler, subject = getattr(instance, "scaler", None), _subject(instance)
    return _load(wrapped, args, kwargs, instance.checkpoint_manager, scaler, subject=subject)


def save_manager(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``FSDPCheckpointManager.save_checkpoint``, for the legacy workers."""
    return _save(wrapped, args, kwargs, instance, _scaler_of(instance.optimizer))


def load_manager(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``FSDPCheckpointManager.load_checkpoint``, for the legacy workers."""
    scaler = _scaler_of(instance.optimizer)
    return _load(wrapped, args, kwargs, instance, scaler, subject="optimizer")


def _scaler_of(optimizer: Any) -> GradScaler | None:
    return _legacy.get(optimizer) if optimizer is not None else None


def _save(wrapped: Any, args: Any, kwargs: Any, manager: Any, scaler: Any) -> Any:
    path = inspect.signature(wrapped).bind(*args, **kwargs).arguments["local_path"]
    if not _goes_with(manager, path, scaler, manager.checkpoint_save_contents):
        return wrapped(*args, **kwargs)
    # Before verl's own files: verl removes an older checkpoint as soon as these are written. Into
    # a directory that verl may remove first, to make room, after them.
    again = _saved_before(manager, path)
    if not again:
        loss_scaling.save_scaler("verl", path, scaler)
    result = wrapped(*args, **kwargs)
    if again:
        loss_scaling.save_scaler("verl", path, scaler)
    return result


def _load(wrapped: Any, args: Any, kwargs: Any, manager: Any, scaler: Any, *, subject: str) -> Any:
    result = wrapped(*args, **kwargs)
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    path = bound.arguments["local_path"]  # None: a fresh start
    if _goes_with(manager, path, scaler, manager.checkpoint_load_contents):
        with _near(path, bool(bound.arguments.get("del_local_after_load"))) as directory:
            loss_scaling.restore_scaler("verl", directory, scaler, subject)
    return result


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
