"""NeMo-RL's DTensor workers in float16: loss scaling, metrics, checkpoints, and the actor class.

The wrappers stand on the methods of a worker, or are reached through ``ScaledWorker`` where Ray
exports the class by value. Where both apply the outer one does the work.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import wrapt

from precision_shim.adapting import in_force, parse_settings, version_of, warn
from precision_shim.errors import SeamError
from precision_shim.scaling import LossScaler

from ..loss_scaling import (
    FEATURE,
    VARIABLES,
    make_scaler,
    metrics,
    restore_scaler,
    save_scaler,
    steps_through,
)
from ..ray_actors import class_beneath, put_in_front

FRAMEWORK = "nemo-rl"
BLOCK = "precision_shim"
"""Key of the optional block in a policy's or value model's config."""

_KINDS = {
    "DTensorPolicyWorker": ("dtensor v1", "policy"),
    "DTensorPolicyWorkerImpl": ("dtensor v1", "policy"),
    "DTensorPolicyWorkerV2": ("dtensor v2", "policy"),
    "DTensorPolicyWorkerV2Impl": ("dtensor v2", "policy"),
    "DTensorValueWorkerV2": ("dtensor value", "value"),
    "DTensorValueWorkerV2Impl": ("dtensor value", "value"),
}
"""Names of NeMo-RL's classes, to the path of their seams and the name of their config."""

_READ = {
    "__init__": ("weights_path", "optimizer_path"),
    "save_checkpoint": ("weights_path", "optimizer_path"),
    "load_checkpoint": ("weights_path", "optimizer_path"),
}
"""What the wrappers read of a worker's methods, by their signatures."""

_AUXILIARY = "nemo_automodel.components.moe.megatron.moe_utils"

TRAIN = ("data", "loss_fn", "eval_mode")
"""The first parameters of ``train``, whose decorator hides its signature."""


@dataclass
class _Training:
    scaler: LossScaler
    optimizer: torch.optim.Optimizer
    unscaled: bool = False
    skips: list[bool] = field(default_factory=list)


_training: contextvars.ContextVar[_Training | None] = contextvars.ContextVar(
    "precision_shim_nemo_rl_training", default=None
)
"""The worker whose gradients are being made."""


def _where() -> str:
    return f"NeMo-RL {version_of(FRAMEWORK, ('nemo_rl',))}"


# -- the actor class ------------------------------------------------------------------------


class ScaledWorker:
    """Goes in front of a worker's class. It is importable, so Ray ships it by reference."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        build(super().__init__, self, args, kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; in float16 with the loss scaled."""
        return train(super().train, self, args, kwargs)  # type: ignore[misc]

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Save, the scaler's state beside the optimizer's."""
        return save_checkpoint(super().save_checkpoint, self, args, kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load, the scaler's state with the optimizer's."""
        return load_checkpoint(super().load_checkpoint, self, args, kwargs)  # type: ignore[misc]


def redecorate(actor_class: Any) -> Any:
    """Make an actor class of the same name and options whose worker scales its loss.

    Raises:
        SeamError: it is not what ``ray.remote`` makes of a class, or its methods lack what the
            wrappers read.
    """
    worker = class_beneath(actor_class)
    for method, needed in _READ.items():
        parameters = inspect.signature(getattr(worker, method)).parameters
        lacking = [name for name in needed if name not in parameters]
        if lacking:
            raise SeamError(f"{worker.__name__}.{method} has no parameter {lacking[0]!r}")
    return put_in_front(ScaledWorker, actor_class)


@contextlib.contextmanager
def _outermost(instance: Any, what: str) -> Iterator[bool]:
    """Whether this is the outer of two wrappers: the mixin's and that of the class beneath."""
    inside: set[str] = instance.__dict__.setdefault("_precision_shim_inside", set())
    if what in inside:
        yield False
        return
    inside.add(what)
    try:
        yield True
    finally:
        inside.discard(what)


def _kind(instance: Any) -> tuple[str, str]:
    return next(_KINDS[one.__name__] for one in type(instance).__mro__ if one.__name__ in _KINDS)


def _argument(wrapped: Any, args: Any, kwargs: Any, name: str) -> Any:
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments.get(name)


# -- building -------------------------------------------------------------------------------


def build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Build a worker, and its scaler with the state of the checkpoint that it resumes from."""
    with _outermost(instance, "build") as outermost:
        wrapped(*args, **kwargs)
        if not outermost or instance.cfg.get("precision") != "float16":
            return
        if getattr(instance, "optimizer", None) is None:  # a reference or a teacher
            return
        path, name = _kind(instance)
        if not in_force(FRAMEWORK, FEATURE, path):
            warn(
                f"{_where()}: {type(instance).__name__} was exported with the shim, but in its own "
                "process the shim is off or refused: float16 trains without loss scaling. Set "
                "PRECISION_SHIM=1 before the cluster is started, so that every worker has it."
            )
            return
        scaler = make_scaler(
            FRAMEWORK,
            name,
            device="cuda" if torch.cuda.is_available() else "cpu",
            because=f"{name}.precision is float16, and NeMo-RL does not scale the loss",
            configured=_configured(instance.cfg, name),
        )
        # Not before here: the first worker loads its checkpoint within its own __init__ by
        # load_checkpoint, the second from 0.6 on past it.
        optimizer_path = _argument(wrapped, args, kwargs, "optimizer_path")
        if optimizer_path and _argument(wrapped, args, kwargs, "weights_path"):
            restore_scaler(FRAMEWORK, optimizer_path, scaler, name)
        instance._precision_shim_scaler = scaler


def _configured(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The optional block of a config, by the names of ``ScalerSettings``.

    Raises:
        SettingsError: names the key and the value, and what is allowed.
    """
    block = config.get(BLOCK) or {}
    values = parse_settings(block, VARIABLES.values(), f"{_where()}, {name}.{BLOCK}")
    return {ours: values[key] for ours, key in VARIABLES.items() if key in values}


def _scaler(instance: Any) -> LossScaler | None:
    """A worker's scaler, as long as the shim is in force for it."""
    scaler: LossScaler | None = instance.__dict__.get("_precision_shim_scaler")
    if scaler is None or not in_force(FRAMEWORK, FEATURE, _kind(instance)[0]):
        return None
    return scaler


# -- training -------------------------------------------------------------------------------


def train(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Train on some global batches, each with a scaled loss and a step that may be skipped."""
    scaler = _scaler(instance)
    if scaler is None:
        return wrapped(*args, **kwargs)
    with _outermost(instance, "train") as outermost:
        given = {**dict(zip(TRAIN, args, strict=False)), **kwargs}
        if not outermost or given.get("eval_mode"):
            return wrapped(*args, **kwargs)
        with (
            _stepping(_Training(scaler, instance.optimizer)) as training,
            _auxiliary_losses(scaler) as follow,
        ):
            scaled = _ScaledLoss(given["loss_fn"], scaler, follow)
            if "loss_fn" in kwargs:
                kwargs = {**kwargs, "loss_fn": scaled}
            else:
                args = (args[0], scaled, *args[2:])
            result = wrapped(*args, **kwargs)
    return _report(result, training)


class _ScaledLoss(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A loss function whose losses send scaled gradients back; all else is the function's own."""

    def __init__(
        self, loss_fn: Any, scaler: LossScaler, follow: Callable[[torch.device], None]
    ) -> None:
        super().__init__(loss_fn)
        self._self_scaler = scaler
        self._self_follow = follow

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss, *rest = self.__wrapped__(*args, **kwargs)
        self._self_scaler.attach(loss)
        self._self_follow(loss.device)
        return (loss, *rest)


@contextlib.contextmanager
def _auxiliary_losses(scaler: LossScaler) -> Iterator[Callable[[torch.device], None]]:
    """Scale the gradients of a mixture of experts' auxiliary losses, too.

    They do not come through the loss: nemo_automodel puts them into the backward pass by an
    autograd function of its own, times a number that stands in its class and is 1 in NeMo-RL.
    Yields what brings that number up to the scale, before each backward pass.
    """
    holder = getattr(sys.modules.get(_AUXILIARY), "MoEAuxLossAutoScaler", None)
    if holder is None:
        yield lambda device: None
        return
    before = holder.main_loss_backward_scale
    own = 1.0 if before is None else before

    def follow(device: torch.device) -> None:
        holder.main_loss_backward_scale = scaler.scale(torch.ones((), device=device)) * own

    try:
        yield follow
    finally:
        holder.main_loss_backward_scale = before


@contextlib.contextmanager
def _stepping(training: _Training) -> Iterator[_Training]:
    """Let the scaler take the optimizer's steps.

    Only for as long as a worker trains: torch's distributed checkpoints step the optimizer on
    dummy gradients to make its state, and that step must be the optimizer's own.
    """
    scaler, optimizer = training.scaler, training.optimizer

    def step(*args: Any, **kwargs: Any) -> Any:
        if not training.unscaled:
            raise SeamError(
                f"{_where()}: a step came before the gradients were unscaled, so that they were "
                "clipped while scaled: this version takes their norm elsewhere. Leave the feature "
                f"out with PRECISION_SHIM_FEATURES=-{FEATURE}, or train in bfloat16."
            )
        training.unscaled = False
        before = scaler.counter.skipped
        result = scaler.step(optimizer, *args, **kwargs)
        scaler.update()
        training.skips.append(scaler.counter.skipped > before)
        if training.skips[-1]:
            # The LR schedule goes on as NeMo-RL has it, and torch need not warn of its order.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        return result

    token = _training.set(training)
    try:
        with steps_through(step, optimizer):
            yield training
    finally:
        _training.reset(token)


def unscale_first(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Unscale the gradients before their norm is taken and before they are clipped."""
    training = _training.get()
    if training is not None:
        training.scaler.unscale_once(training.optimizer)
        training.unscaled = True
    return wrapped(*args, **kwargs)


def _report(result: dict[str, Any], training: _Training) -> dict[str, Any]:
    """Add the scaler's figures to what a worker returns.

    Of a worker's metrics NeMo-RL passes on only the lists in ``all_mb_metrics``, and sums most of
    them over micro-batches and ranks: so each figure stands there once per call, on rank 0.
    """
    norm = result.get("grad_norm")
    if norm is not None and training.skips and training.skips[-1]:
        result["grad_norm"] = norm * torch.nan if torch.is_tensor(norm) else float("nan")
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        for name, value in metrics(training.scaler).items():
            result["all_mb_metrics"][name] = [value]
    return result


# -- checkpoints ----------------------------------------------------------------------------


def save_checkpoint(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Save, and write the scaler's state beside the optimizer's where that is saved."""
    with _outermost(instance, "save") as outermost:
        result = wrapped(*args, **kwargs)
        optimizer_path = _argument(wrapped, args, kwargs, "optimizer_path")
        if outermost and optimizer_path:
            save_scaler(FRAMEWORK, optimizer_path, _scaler(instance))
        return result


def load_checkpoint(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Load, and restore the scaler where the optimizer is restored."""
    with _outermost(instance, "load") as outermost:
        result = wrapped(*args, **kwargs)
        optimizer_path = _argument(wrapped, args, kwargs, "optimizer_path")
        if outermost and optimizer_path:
            restore_scaler(FRAMEWORK, optimizer_path, _scaler(instance), _kind(instance)[1])
        return result
