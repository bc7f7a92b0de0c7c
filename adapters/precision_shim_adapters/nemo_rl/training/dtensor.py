"""NeMo-RL's DTensor workers in float16: loss scaling, metrics, checkpoints, and the actor class.

The seams patch a worker's methods. If Ray pickles a worker's class by value, the mixin
``ScaledWorker`` calls the seams' functions. If a seam and ``ScaledWorker`` both wrap a method, only
the outer wrapper has an effect.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from precision_shim.adapting import Call, in_force, seam, versioned, warn
from precision_shim.adapting.scaling import files_of_rank
from precision_shim.errors import SeamError

from ...common.ray_actors import class_beneath, put_in_front
from ...torch_fp16 import FEATURE, ScaledTraining
from ...torch_fp16.auxiliary import auxiliary_losses
from ...torch_fp16.states import make_missing_states
from ..config import FRAMEWORK, computed_in, read_section, scaled_because
from .workers import DTENSOR, INHERITED, TRAIN, VALUE_V2, exported, group_at, mixin

_READ = ("weights_path", "optimizer_path")
"""Parameters of ``__init__`` and of the methods for checkpoints that this file's functions read."""

_PULL = "https://github.com/NVIDIA-NeMo/RL/pull/1474"
_DELETE = "NeMo-RL scales the loss of float16 policies"
_METHODS = ("__init__", "train", "save_checkpoint", "load_checkpoint")
_RELIES_ON = (*_METHODS, *TRAIN, "cfg", "optimizer", "step", "scheduler", "model")
_FP16: dict[str, Any] = {"feature": FEATURE, "upstream": _PULL, "delete_when": _DELETE}
"""Arguments that all seams on the DTensor workers share."""


def _at_method(name: str) -> list[dict[str, Any]]:
    return [
        worker.at(f"{worker.beneath}.{name}", worker.beneath, relies_on=(*_RELIES_ON, worker.clips))
        for worker in DTENSOR
    ]


@exported((each.actor_class(each.beneath, *_RELIES_ON, each.clips) for each in DTENSOR), **_FP16)
def redecorate(actor_class: Any) -> Any:
    """Make the actor class again with ``ScaledWorker`` as the worker's first base class.

    Raises:
        SeamError: a method lacks a parameter in ``_READ``.
    """
    worker = class_beneath(actor_class)
    for method in ("__init__", "save_checkpoint", "load_checkpoint"):
        parameters = inspect.signature(getattr(worker, method)).parameters
        lacking = [name for name in _READ if name not in parameters]
        if lacking:
            raise SeamError(f"{worker.__name__}.{method} has no parameter {lacking[0]!r}")
    return put_in_front(ScaledWorker, actor_class)


@contextlib.contextmanager
def outermost(instance: Any, what: str) -> Iterator[bool]:
    """Yield True in an outer call, and False in a nested call of the same function."""
    inside: set[str] = instance.__dict__.setdefault("_precision_shim_inside", set())
    if what in inside:
        yield False
        return
    inside.add(what)
    try:
        yield True
    finally:
        inside.discard(what)
        if not inside:
            del instance.__dict__["_precision_shim_inside"]


@seam(at=_at_method("__init__"), why=INHERITED, **_FP16)
def build(call: Call, weights_path: Any, optimizer_path: Any) -> None:
    """Build a worker and its scaler; restore the scaler if the worker resumes a checkpoint."""
    instance = call.instance
    with outermost(instance, "build") as outer:
        call.proceed()
        if not outer or computed_in(instance.cfg, "policy")[0] is not torch.float16:
            return
        if getattr(instance, "optimizer", None) is None:  # a reference or teacher model
            return
        path = group_at(instance)
        name = "value" if path == VALUE_V2 else "policy"
        if not in_force(FRAMEWORK, FEATURE, path):
            warn(
                f"{versioned(FRAMEWORK, called='NeMo-RL')}: {type(instance).__name__} was exported "
                "with the shim, but in its own process the shim is off or refused: float16 trains "
                "without loss scaling. Set PRECISION_SHIM=1 before the cluster is started, so "
                "that every worker has it."
            )
            return
        device = "cuda" if torch.cuda.is_available() else "cpu"
        because, configured = scaled_because(name), read_section(instance.cfg, name)
        training = ScaledTraining.make(
            FRAMEWORK, name, device=device, because=because, configured=configured
        )
        # Restore the scaler here, because a v1 worker calls load_checkpoint before the scaler
        # exists. In NeMo-RL 0.6 and later a v2 worker does not call load_checkpoint.
        if optimizer_path and weights_path:
            training.restore(optimizer_path, files_of_rank(_places(optimizer_path, weights_path)))
        training.keep(instance)


def _training_of(instance: Any) -> ScaledTraining | None:
    """A worker's ``ScaledTraining``; ``None`` if fp16 scaling is off in this process."""
    training = ScaledTraining.of(instance)
    if training is None or not in_force(FRAMEWORK, FEATURE, group_at(instance)):
        return None
    return training


@seam(at=_at_method("train"), why=INHERITED, **_FP16)
def train(call: Call, loss_fn: Any, eval_mode: Any = False) -> Any:
    """Train on global batches, each with a scaled loss and a step that the scaler may skip."""
    training = _training_of(call.instance)
    if training is None:
        return call.proceed()
    with outermost(call.instance, "train") as outer:
        if not outer or eval_mode:
            return call.proceed()
        steps = training.several_steps(call.instance.optimizer)
        with steps, auxiliary_losses(training) as follow:
            call.arguments["loss_fn"] = training.scaled(loss_fn, follow)
            result = call.proceed()
    if result.get("grad_norm") is not None:
        result["grad_norm"] = training.norm(result["grad_norm"])
    add_figures(result, training.metrics())
    return result


@seam(
    at=[
        # If an optional worker is missing, do not patch its ``clip``, which other workers call too.
        each.at(
            each.clip,
            *((each.module,) if each.optional else ()),
            aliases=(f"{each.module}:{each.clips}",),
        )
        for each in DTENSOR
    ],
    why="the first look at the gradients: norm and clipping want them unscaled",
    optional=True,  # a process may lack nemo_automodel and its workers
    **_FP16,
)
def unscale_first(call: Call) -> Any:
    """Unscale the gradients before the worker computes their norm and clips them."""
    training = ScaledTraining.current()
    if training is None:
        return call.proceed()
    with training.before_clipping():
        return call.proceed()


def add_figures(result: dict[str, Any], figures: Mapping[str, float]) -> None:
    """Add metrics to a ``train`` result on rank 0, because NeMo-RL sums most lists over ranks."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        result["all_mb_metrics"].update({name: [value] for name, value in figures.items()})


@seam(at=_at_method("save_checkpoint"), why=INHERITED, **_FP16)
def save_checkpoint(call: Call, weights_path: Any, optimizer_path: Any) -> Any:
    """Save a checkpoint; if NeMo-RL saves the optimizer, save the scaler's state as well."""
    worker = call.instance
    with outermost(worker, "save") as outer:
        training = _training_of(worker) if outer and optimizer_path else None
        if training is None:
            return call.proceed()
        make_missing_states(worker.optimizer)
        if _saves_later(worker, call.arguments.get("checkpointing_cfg")):
            result = call.proceed()
            training.save(optimizer_path)
            return result
        places = _places(optimizer_path, weights_path)
        with training.saved_aside(optimizer_path, places) as aside:
            call.arguments["optimizer_path"], call.arguments["weights_path"] = aside.values()
            return call.proceed()


@seam(at=_at_method("load_checkpoint"), why=INHERITED, **_FP16)
def load_checkpoint(call: Call, weights_path: Any, optimizer_path: Any) -> Any:
    """Load a checkpoint; if NeMo-RL restores the optimizer, restore the scaler as well."""
    with outermost(call.instance, "load") as outer:
        result = call.proceed()
        training = _training_of(call.instance) if outer and optimizer_path else None
        if training is not None:
            training.restore(optimizer_path, files_of_rank(_places(optimizer_path, weights_path)))
        return result


def _places(optimizer: str, weights: str) -> dict[str, str]:
    return {"": optimizer, "../weights/": weights}


def _saves_later(instance: Any, given: Any) -> bool:
    """Whether a worker writes its files in the background, after ``save_checkpoint`` returns."""
    manager = getattr(instance, "checkpoint_manager", None)
    held = getattr(getattr(manager, "checkpoint_config", None), "is_async", False)
    return bool((given or {}).get("is_async", held))


ScaledWorker = mixin(
    __name__,
    "ScaledWorker",
    __init__=[build],
    train=[train],
    save_checkpoint=[save_checkpoint],
    load_checkpoint=[load_checkpoint],
)
"""A mixin that scales a worker's loss."""
