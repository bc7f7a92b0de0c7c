"""fp16 on Megatron-core: an overflow is a skipped step, whatever the framework makes of it.

Megatron itself scales the loss, unscales the gradients, agrees over all ranks on what is not
finite, skips and saves its scaler's state. What is missing is around it: frameworks take the
``(False, None, None)`` of a skipped step for a failure, nobody counts, and the optimizers of a
mixture of experts let their scales drift apart.

Why these layers. Every framework ends in ``ChainedOptimizer.step`` or, unchained, in
``MixedPrecisionOptimizer.step``: there the answer is translated, and only inside ``skipping``,
which a framework's adapter puts around its own call. ``ChainedOptimizer.prepare_grads`` is the one
place where all scalers of a step have been asked and none of the steps is taken.
``DynamicGradScaler.__init__`` has the two factors that no config has a field for. The check of
gradients sits in the DDP and is read from its config, so the config that the DDP is built with
is the place to turn it off.

Deliberately not patched: ``ConstantGradScaler`` (a static ``loss_scale`` is the user's, and what
does not fit it is the framework's own error), and the threshold on the gradient norm of 0.18,
which is no overflow. The scaler's checkpoint is Megatron's own; the counts are not part of it.

Delete when: frameworks take a skipped step for one, and chained optimizers share a scaler.
"""

from __future__ import annotations

import copy
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from precision_shim.adapting import Call, current_settings, decide, seam, warn
from precision_shim.errors import SettingsError
from precision_shim.rules.model import trainable_dtypes
from precision_shim.rules.optimizer import ROWS
from precision_shim.scaling import SkipCounter

from . import megatron

FEATURE = "fp16-scaling"
PATHS = {"megatron-fsdp": "Megatron-FSDP (overflows)"}
"""What users call the path of these seams that is not the framework's own."""

_OPTIMIZER = "megatron.core.optimizer.optimizer"
_SCALER = "megatron.core.optimizer.grad_scaler:DynamicGradScaler.__init__"
_FSDP = "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel.__init__"
_Wrapper = TypeVar("_Wrapper", bound=Callable[..., Any])


def _seam(
    target: str, why: str, delete_when: str, *relies_on: str, group: str = "megatron"
) -> Callable[[_Wrapper], _Wrapper]:
    return seam(
        target,
        FEATURE,
        group=group,
        why=why,
        delete_when=delete_when,
        relies_on=relies_on,
        optional=True,
    )


# -- the scalers of an optimizer ---------------------------------------------------------------


def dynamic_scalers(optimizer: Any) -> list[Any]:
    """The dynamic scalers of an optimizer and of those chained in it.

    The first is the one whose scale the loss is multiplied with; empty where nothing is scaled, or
    by a constant.
    """
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    scalers = (getattr(one, "grad_scaler", None) for one in _unchained(optimizer))
    return [scaler for scaler in scalers if isinstance(scaler, DynamicGradScaler)]


def _unchained(optimizer: Any) -> list[Any]:
    """The optimizers that a chained one stands for, or the one itself."""
    if not hasattr(optimizer, "chained_optimizers"):
        return [optimizer]
    return [one for inner in optimizer.chained_optimizers for one in _unchained(inner)]


_read: weakref.WeakKeyDictionary[Any, tuple[torch.Tensor, float]] = weakref.WeakKeyDictionary()
"""Scalers, to their scale as it was last read and its value."""


def scale_of(scaler: Any) -> float:
    """A scaler's scale as a number; asks the device only where it is a new tensor.

    Megatron never changes the tensor in place: it puts a new one there.
    """
    scale = scaler.scale
    known = _read.get(scaler)
    if known is None or known[0] is not scale:
        known = _read[scaler] = scale, float(scale.item())
    return known[1]


# -- a skipped step ----------------------------------------------------------------------------


@dataclass
class Account:
    """What is known of an optimizer's steps under dynamic loss scaling.

    Attributes:
        counter: of steps and skips.
        scale: the loss scale that the last step was made with.
    """

    counter: SkipCounter = field(default_factory=SkipCounter)
    scale: float = math.nan


@dataclass(frozen=True)
class _Skipping:
    framework: str
    subject: str
    succeeds: bool


_skipping: ContextVar[_Skipping | None] = ContextVar("precision_shim_skipping", default=None)
_accounts: weakref.WeakKeyDictionary[Any, Account] = weakref.WeakKeyDictionary()


@contextmanager
def skipping(framework: str, subject: str, *, succeeds: bool) -> Iterator[None]:
    """Say that a framework is stepping an optimizer of Megatron's, and what it makes of a skip.

    Args:
        framework: the framework's name.
        subject: which model.
        succeeds: whether a skipped step is handed to it as one that succeeded, because it takes
            the other for fatal. Its grad norm is NaN either way.
    """
    token = _skipping.set(_Skipping(framework, subject, succeeds))
    try:
        yield
    finally:
        _skipping.reset(token)


@_seam(
    f"{_OPTIMIZER}:ChainedOptimizer.step",
    "every framework's step ends here, with the scaler at hand",
    "frameworks take (False, None, None) for a skipped step",
    "prepare_grads",
)
@_seam(
    f"{_OPTIMIZER}:MixedPrecisionOptimizer.step",
    "every framework's step ends here, with the scaler at hand",
    "frameworks take (False, None, None) for a skipped step",
    "prepare_grads",
)
def answer_a_skip(call: Call) -> Any:
    """Count a step, and answer for a skipped one as the framework can take it.

    Raises:
        LossScaleError: too many steps in a row were skipped.
    """
    return answered(call.instance, call.proceed)


def answered(optimizer: Any, step: Callable[[], Any]) -> Any:
    """Take a step of Megatron's, and answer as ``skipping`` says.

    Raises:
        LossScaleError: too many steps in a row were skipped.
    """
    around = _skipping.get()
    scalers = dynamic_scalers(optimizer) if around is not None else []
    if around is None or not scalers:
        return step()
    account = _accounts.setdefault(optimizer, Account())
    account.scale = scale_of(scalers[0])
    successful, grad_norm, zeros = step()
    # 0.18's threshold on the gradient norm fails a step too, and has a norm to tell.
    skipped = not successful and grad_norm is None
    account.counter.note(skipped, account.scale)
    if skipped:
        _make_states(optimizer)
        return around.succeeds, math.nan, zeros
    return successful, grad_norm, zeros


def _make_states(optimizer: Any) -> None:
    """Give optimizers that have never stepped the states of a first step.

    Megatron cannot save without them: a job whose first steps are all skipped would end at its
    first checkpoint. (With torch's Adam in place of FusedAdam it cannot load what it saves.)
    """
    for one in _unchained(optimizer):
        inner = getattr(one, "optimizer", None)
        make = getattr(inner, "initialize_state", None)  # FusedAdam's, which its step calls
        if inner is None or make is None or inner.state:
            continue
        # Up to TransformerEngine 2.0 it takes the parameter alone.
        two = "store_param_remainders" in inspect.signature(make).parameters
        kept = bool(getattr(inner, "store_param_remainders", False))
        for param in (param for group in inner.param_groups for param in group["params"]):
            make(*(param, kept and param.dtype is torch.bfloat16) if two else (param,))


def metrics(optimizer: Any, prefix: str = "") -> dict[str, float]:
    """``loss_scale`` and ``skipped_steps`` of an optimizer; empty where nothing was counted.

    ``loss_scale`` is the one that the last step was made with; ``skipped_steps`` counts from the
    start of this process.
    """
    account = _accounts.get(optimizer) if optimizer is not None else None
    if account is None:
        return {}
    return {
        f"{prefix}loss_scale": account.scale,
        f"{prefix}skipped_steps": float(account.counter.skipped),
    }


# -- one scale for all chained optimizers ------------------------------------------------------


@_seam(
    f"{_OPTIMIZER}:ChainedOptimizer.prepare_grads",
    "all scalers of a step have been asked here, and no optimizer has stepped",
    "Megatron's chained optimizers share one scaler",
    "chained_optimizers",
    "get_loss_scale",
)
def keep_one_scale(call: Call) -> Any:
    """Let all chained optimizers see an overflow that one of them found.

    The loss is multiplied with the first scaler's scale, and each optimizer divides by its own: in
    a mixture of experts an overflow of the experts alone would leave theirs behind.
    """
    scalers = dynamic_scalers(call.instance)
    if len(scalers) < 2:
        return call.proceed()
    first = scalers[0]
    before = first.state_dict()
    for other in scalers[1:]:
        apart = _trackers(other) != _trackers(first) or scale_of(other) != scale_of(first)
        if apart:
            warn(
                f"{megatron.megatron_label()}: the optimizers of one model have different loss "
                f"scales ({scale_of(first):g} and {scale_of(other):g}), as a checkpoint of an "
                "unpatched Megatron may hold them. The loss was scaled with the first: all "
                "continue with it."
            )
            other.load_state_dict(before)
    found_inf = call.proceed()
    if found_inf:
        for scaler in scalers:  # those that found nothing have counted a good step
            scaler.load_state_dict(before)
            scaler.update(True)
    return found_inf


def _trackers(scaler: Any) -> tuple[Any, ...]:
    return tuple(value for key, value in sorted(scaler.state_dict().items()) if key != "scale")


# -- the user's settings -----------------------------------------------------------------------

SCALER_FIELDS = {"loss_scale_init": "initial_loss_scale", "growth_interval": "loss_scale_window"}
"""The shim's settings, to the fields of Megatron's OptimizerConfig."""


def scaler_settings() -> dict[str, Any]:
    """The fields of a scaler that the user set by the shim's settings."""
    settings = current_settings()
    return {field: settings[key] for key, field in SCALER_FIELDS.items() if settings.is_set(key)}


def with_scaler_settings(written: Mapping[str, Any], key: str) -> dict[str, Any]:
    """What the user wrote in a framework's config over what the user set by the shim's settings.

    Args:
        written: fields of Megatron's OptimizerConfig.
        key: where the framework's config has them, for the message.

    Raises:
        SettingsError: the first scale is below the scaler's minimum.
    """
    values = {**scaler_settings(), **written}
    least = values.get("min_loss_scale", ROWS[torch.float16]["min_loss_scale"])
    first = values.get("initial_loss_scale")
    if "initial_loss_scale" not in written and first is not None and first < least:
        raise SettingsError(
            f"PRECISION_SHIM_LOSS_SCALE_INIT={first:g} is below min_loss_scale={least:g} of "
            f"Megatron's scaler. Raise it, or lower {key}.min_loss_scale."
        )
    return values


@_seam(
    _SCALER,
    "growth and backoff factor are constants in Megatron's call; no config reaches them",
    "OptimizerConfig has fields for both factors",
    "_growth_tracker",
    "_hysteresis_tracker",
    "_scale",
)
def take_settings(
    call: Call,
    initial_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: float,
) -> Any:
    """Make a scaler with the factors that the user set, and say what it was made with."""
    factors = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
    settings = current_settings()
    taken = {key: settings[key] for key in factors if settings.is_set(key)}
    call.arguments.update(taken)
    factors.update(taken)
    build = megatron.current_build()
    decide(
        build.framework if build is not None else "megatron",
        build.subject() if build is not None else "direct caller",
        FEATURE,
        f"Megatron's dynamic loss scaler from {initial_scale:g}, growth "
        f"x{factors['growth_factor']:g} after {growth_interval:g} steps, backoff "
        f"x{factors['backoff_factor']:g}",
        "the model is fp16" + (f"; {', '.join(taken)} by the shim's settings" if taken else ""),
    )
    return call.proceed()


# -- the DDP's own check -----------------------------------------------------------------------


@_seam(
    megatron.DDP,
    "the DDP reads check_for_nan_in_grad from this config at each reduction",
    "Megatron's check asks whether the loss scale is dynamic",
)
@_seam(
    _FSDP,
    "the same for Megatron-FSDP, which has a class of its own",
    "Megatron's check asks whether the loss scale is dynamic",
    group="megatron-fsdp",
)
def let_overflows_pass(call: Call, ddp_config: Any, module: Any) -> Any:
    """Turn ``check_for_nan_in_grad`` off where the scaler will see to what is not finite."""
    build = megatron.current_build()
    if build is None or build.constant_scale():
        return call.proceed()
    checks = bool(getattr(ddp_config, "check_for_nan_in_grad", False))
    if not checks or torch.float16 not in trainable_dtypes(module.parameters()).counts:
        return call.proceed()
    if build.nan_check_set:
        warn(
            f"{build.framework} {build.subject()}: check_for_nan_in_grad=True is the user's: an "
            "fp16 overflow ends the job before the loss scaler can skip the step. Leave it out, "
            "or set it to False."
        )
        return call.proceed()
    # A copy: the caller's config is the caller's, and other chunks share it.
    changed = call.arguments["ddp_config"] = copy.copy(ddp_config)
    changed.check_for_nan_in_grad = False
    decide(
        build.framework,
        build.subject(),
        FEATURE,
        "check_for_nan_in_grad=False",
        "it would end the job at an fp16 overflow, which the dynamic loss scaler skips",
    )
    return call.proceed()
