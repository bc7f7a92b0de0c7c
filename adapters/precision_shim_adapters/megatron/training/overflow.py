"""Make an fp16 overflow skip the step in every framework on Megatron-core, and count the skips.

Without the shim, frameworks fail at a skipped step's ``(False, None, None)``, chained optimizers'
loss scales drift apart, and a second ``prepare_grads`` unscales again. Deliberately not patched:
``ConstantGradScaler`` (static ``loss_scale``), and 0.18's gradient norm threshold (no overflow).
Delete this module when frameworks accept a skipped step, and chained optimizers share a scaler.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from precision_shim.adapting import Call, check_ranks, current_settings, decide, holding, seam, warn
from precision_shim.scaling import SkipCounter
from precision_shim.scaling.record import lower_tracker

from ..buffers import unchain
from ..policy.requested import ON_SCALING, SCALING
from ..policy.scaler import describe_scaler, factors_set
from .build import DIRECT, current_build, megatron_label
from .first_states import make_states
from .loss_scaling import tell_unscaled

_OPTIMIZER = "megatron.core.optimizer.optimizer"
SCALER = "megatron.core.optimizer.grad_scaler:DynamicGradScaler.__init__"


def dynamic_scalers(optimizer: Any) -> list[Any]:
    """The dynamic scalers of an optimizer and of its chain; the loss is scaled with the first."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    scalers = (getattr(inner, "grad_scaler", None) for inner in unchain(optimizer))
    return [scaler for scaler in scalers if isinstance(scaler, DynamicGradScaler)]


_read: weakref.WeakKeyDictionary[Any, tuple[torch.Tensor, float]] = weakref.WeakKeyDictionary()
"""Cache of ``scale_of``: maps a scaler to its last scale tensor and to that tensor's value."""


def scale_of(scaler: Any) -> float:
    """A scaler's scale as a number, copied from the device only if the scale is a new tensor.

    Megatron never changes the scale's tensor in place: each new scale is a new tensor.
    """
    scale = scaler.scale
    known = _read.get(scaler)
    if known is None or known[0] is not scale:
        known = _read[scaler] = scale, float(scale.item())
    return known[1]


@dataclass
class Account:
    """The shim's record of an optimizer's steps under dynamic loss scaling.

    Attributes:
        scale: the loss scale of the last step.
        succeeds: see ``answer_skips``; ``None`` for Megatron's return value.
    """

    counter: SkipCounter = field(default_factory=SkipCounter)
    scale: float = math.nan
    succeeds: bool | None = None


_succeeds: ContextVar[bool | None] = ContextVar("precision_shim_skip_succeeds", default=None)
"""The success flag to return for a skipped step: set by ``skipping``, read by ``answer_step``."""

_accounts: weakref.WeakKeyDictionary[Any, Account] = weakref.WeakKeyDictionary()
"""Maps an optimizer to its ``Account``, for ``answer_step`` and ``metrics``."""


def _account(optimizer: Any) -> Account | None:
    known = (_accounts.get(inner) for inner in (optimizer, *unchain(optimizer)))
    return next((account for account in known if account is not None), None)


def skipping(*, succeeds: bool) -> AbstractContextManager[None]:
    """Set the success flag that a skipped step of Megatron's optimizer returns to the framework.

    An adapter enters ``skipping`` around its framework's step; with ``succeeds=True`` if the
    framework ends the job at a failed step. A skipped step's grad norm is always NaN.
    """
    return holding(_succeeds, succeeds)


def answer_skips(optimizer: Any, *, succeeds: bool) -> None:
    """Set the success flag that an optimizer's skipped steps return outside ``skipping``."""
    _accounts.setdefault(optimizer, Account()).succeeds = succeeds


@seam(
    at=[f"{_OPTIMIZER}:ChainedOptimizer.step", f"{_OPTIMIZER}:MixedPrecisionOptimizer.step"],
    why="every framework's step ends here, with the scaler at hand",
    delete_when="frameworks take (False, None, None) for a skipped step",
    relies_on=("prepare_grads",),
    **ON_SCALING,
)
def answer_a_skip(call: Call) -> Any:
    """For a skipped step, return values that the framework can handle."""
    return answer_step(call.instance, call.proceed)


def answer_step(optimizer: Any, step: Callable[[], Any]) -> Any:
    """Run a step; return the flag from ``skipping`` or ``answer_skips`` if the step is skipped.

    Adapters call ``answer_step`` if the framework replaces the optimizer's step by a function.
    """
    known, succeeds = _account(optimizer), _succeeds.get()
    if succeeds is None and known is not None:
        succeeds = known.succeeds
    try:
        result = step()
    finally:
        _forget(optimizer)
    if succeeds is None or not dynamic_scalers(optimizer):
        return result
    successful, grad_norm, zeros = result
    # megatron-core 0.18 also returns False if the gradient norm exceeds a threshold. Only for an
    # overflow does megatron-core return None as the norm.
    if successful or grad_norm is not None:
        return result
    return succeeds, math.nan, zeros


def metrics(optimizer: Any, prefix: str = "", *, from_start: bool = False) -> dict[str, float]:
    """``loss_scale`` and ``skipped_steps`` of an optimizer; empty without dynamic loss scaling.

    ``loss_scale`` is the scale of the last step; ``skipped_steps`` counts from this process's
    start. With ``from_start`` the metrics are there before the first step as well.
    """
    account = _account(optimizer) if optimizer is not None else None
    if account is None or math.isnan(account.scale):
        scalers = dynamic_scalers(optimizer) if from_start and optimizer is not None else []
        if not scalers:
            return {}
        account = Account(scale=scale_of(scalers[0]))
    return {
        f"{prefix}loss_scale": account.scale,
        f"{prefix}skipped_steps": float(account.counter.skipped),
    }


@seam(
    f"{_OPTIMIZER}:ChainedOptimizer.prepare_grads",
    why="all scalers of a step have been asked here, and no optimizer has stepped",
    delete_when="Megatron's chained optimizers share one scaler",
    relies_on=("chained_optimizers", "get_loss_scale"),
    **ON_SCALING,
)
def keep_one_scale(call: Call) -> Any:
    """Make all chained scalers count an overflow that one of the scalers found.

    Megatron scales the loss with the first scaler, and each optimizer's gradients are unscaled with
    its own: an overflow in the experts' gradients would lower only the experts' scale.
    """
    scalers = dynamic_scalers(call.instance)
    if len(scalers) < 2:
        return call.proceed()
    first = scalers[0]
    before = first.state_dict()
    for other in scalers[1:]:
        if _trackers(other) != _trackers(first) or scale_of(other) != scale_of(first):
            warn(
                f"{megatron_label()}: the optimizers of one model have different loss "
                f"scales ({scale_of(first):g} and {scale_of(other):g}), as a checkpoint of an "
                "unpatched Megatron may hold them. The loss was scaled with the first: all "
                "continue with it."
            )
            other.load_state_dict(before)
    found_inf = call.proceed()
    if found_inf:
        for scaler in scalers:  # scalers that found no overflow must count the overflow, too
            scaler.load_state_dict(before)
            scaler.update(True)
    return found_inf


def _trackers(scaler: Any) -> tuple[Any, ...]:
    return tuple(value for key, value in sorted(scaler.state_dict().items()) if key != "scale")


@dataclass(eq=False)
class _Answer:
    """The result of ``prepare_grads``: whether it found an overflow, and the results in a chain."""

    found: bool
    parts: list[_Answer | None]


_answers: weakref.WeakKeyDictionary[Any, _Answer] = weakref.WeakKeyDictionary()
"""Maps an optimizer to its ``_Answer`` until its prepared gradients are used."""

_in_chain: ContextVar[bool] = ContextVar("precision_shim_in_chain", default=False)
"""True while a chain of optimizers prepares gradients, so that only the chain counts the step."""


def _parts(optimizer: Any) -> list[_Answer | None]:
    return [
        _answers.get(inner)
        for inner in unchain(optimizer)
        if inner is not optimizer and dynamic_scalers(inner)
    ]


def _forget(optimizer: Any) -> None:
    for inner in unchain(optimizer):  # the ``_Answer`` of a chain needs its parts' ``_Answer``s
        _answers.pop(inner, None)


@seam(
    at=[
        f"{_OPTIMIZER}:ChainedOptimizer.prepare_grads",
        {
            "target": f"{_OPTIMIZER}:MixedPrecisionOptimizer.prepare_grads",
            "relies_on": ("step_with_ready_grads", "grad_scaler"),
        },
    ],
    why="step() calls it again after trainers that ask for an overflow first, and each call "
    "unscales the fp32 gradients of the bucket and moves the growth tracker",
    delete_when="Megatron's step() takes gradients that are already prepared",
    relies_on=("step_with_ready_grads",),
    **ON_SCALING,
)
def prepare_once(call: Call) -> Any:
    """Prepare the gradients of a step once, and count the step.

    The count is here, since some trainers skip a step by not calling ``step``. Without a dynamic
    scaler every call runs Megatron's function: some trainers call it several times without
    ``zero_grad``.

    Raises:
        LossScaleError: too many steps in a row were skipped.
    """
    optimizer = call.instance
    scalers = dynamic_scalers(optimizer)
    if not scalers:
        return call.proceed()
    known = _answers.get(optimizer)
    if known is not None and known.parts == _parts(optimizer):
        return known.found
    scale, alone = scale_of(scalers[0]), not _in_chain.get()
    try:
        with holding(_in_chain, True):
            found = call.proceed()
    except BaseException:
        _forget(optimizer)
        raise
    _answers[optimizer] = _Answer(found, _parts(optimizer))
    if alone:
        if scale != 1.0:
            tell_unscaled(unchain(optimizer))
        account = _accounts.setdefault(optimizer, Account())
        account.scale = scale
        if found:
            make_states(unchain(optimizer))
        account.counter.note(found, scale, scalers[0].scale)
    return found


@seam(
    at=[
        f"{_OPTIMIZER}:MixedPrecisionOptimizer.step_with_ready_grads",
        f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params.zero_grad",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.zero_grad",
    ],
    why="the gradients are used or gone; a trainer that skips by itself calls only zero_grad",
    delete_when="Megatron's step() takes gradients that are already prepared",
    **ON_SCALING,
)
def forget_answer(call: Call) -> Any:
    """Delete the stored result of ``prepare_grads``, so that the next gradients are prepared."""
    _forget(call.instance)
    return call.proceed()


@seam(
    SCALER,
    why="growth and backoff factor are constants in Megatron's call; no config reaches them",
    delete_when="OptimizerConfig has fields for both factors",
    relies_on=("_growth_tracker", "_hysteresis_tracker", "_scale"),
    **ON_SCALING,
)
def take_settings(
    call: Call,
    initial_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: float,
) -> Any:
    """Make a scaler with the factors that the user set, and report its settings as a decision."""
    check_ranks()  # each rank asks the others for an overflow, and must do so equally often
    taken = factors_set(current_settings())
    factors = {"growth_factor": growth_factor, "backoff_factor": backoff_factor, **taken}
    call.arguments.update(taken)
    build = current_build() or DIRECT
    said = describe_scaler(initial_scale, growth_interval, factors, taken, build.dtype)
    build.decide(SCALING, *said)
    return call.proceed()


@seam(
    "megatron.core.optimizer.grad_scaler:DynamicGradScaler.load_state_dict",
    why="the scale grows where the tracker equals the interval: from a tracker above an interval "
    "that is shorter in this job it would never grow",
    delete_when="Megatron's scaler grows from a tracker above its interval, too",
    relies_on=("_growth_tracker",),
    **ON_SCALING,
)
def load_tracker(call: Call) -> Any:
    """Load a scaler's state; limit the growth tracker to just below this job's growth interval."""
    result = call.proceed()
    scaler = call.instance
    scaler._growth_tracker, chosen = lower_tracker(scaler._growth_tracker, scaler.growth_interval)
    if chosen:
        why = f"the checkpoint's is above the growth interval here, {scaler.growth_interval:g}"
        decide("megatron", "loss scaler", SCALING, chosen, why)
    return result
