"""NeMo-RL's DTensor workers in float16: loss scaling, metrics, checkpoints, and the actor class.

The seams patch a worker's methods. If Ray pickles a worker's class by value, the mixin
``ScaledWorker`` calls the seams' functions. If a seam and ``ScaledWorker`` both wrap a method, only
the outer wrapper has an effect.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import torch

from precision_shim.adapting import Call, around, in_force, parse_settings, seam, versioned, warn
from precision_shim.errors import SeamError
from precision_shim.precision.dtypes import any_dtype, name_of
from precision_shim.precision.effect import COMPUTES, Written
from precision_shim.scaling import files_of_rank

from ...common.ray_actors import class_beneath, put_in_front
from ...torch_fp16 import FEATURE, SETTINGS, ScaledTraining
from ...torch_fp16.auxiliary import auxiliary_losses
from ...torch_fp16.states import make_missing_states
from .unread import Keys
from .unread import unread as find_unread
from .workers import DTENSOR, EXPORTED, INHERITED, V1, V2, VALUE_V2, group_at

FRAMEWORK = "nemo-rl"
DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")
}
"""The dtype names that NeMo-RL accepts; for other names NeMo-RL raises KeyError or ValueError."""

BLOCK = "precision_shim"
"""Key of the shim's optional block in the config of a policy or value model."""

_READ = ("weights_path", "optimizer_path")
"""Parameters of ``__init__`` and of the methods for checkpoints that this file's functions read."""

TRAIN = ("data", "loss_fn", "eval_mode")
"""The first parameters of a worker's ``train``, whose decorator hides the signature."""

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


class ScaledWorker:
    """A mixin that scales a worker's loss; importable, so that Ray pickles it by reference."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        around(build, super().__init__, self, args, kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; a float16 model trains with a scaled loss."""
        method = super().train  # type: ignore[misc]
        return around(train, method, self, args, kwargs, positional=TRAIN)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Save a checkpoint, including the scaler's state."""
        method = super().save_checkpoint  # type: ignore[misc]
        return around(save_checkpoint, method, self, args, kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, including the scaler's state."""
        method = super().load_checkpoint  # type: ignore[misc]
        return around(load_checkpoint, method, self, args, kwargs)


@seam(
    at=[
        place
        for each in DTENSOR
        for place in each.actor_class(each.beneath, *_RELIES_ON, each.clips)
    ],
    why=EXPORTED,
    replaces=True,
    **_FP16,
)
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
def _outermost(instance: Any, what: str) -> Iterator[bool]:
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
    with _outermost(instance, "build") as outermost:
        call.proceed()
        if not outermost or instance.cfg.get("precision") != "float16":
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


def written(config: Mapping[str, Any], name: str, *, sharded: bool = True) -> Iterator[Written]:
    """Yield a model's dtype keys besides Megatron's; ``name`` is the model's key.

    ``sharded``: whether a DTensor worker trains the model, and not Megatron.
    """
    if sharded and config.get("precision") is not None:
        yield Written(f"{name}.precision", config["precision"], COMPUTES)
    loaded = (config.get("hf_config_overrides") or {}).get("dtype")
    if loaded is not None:
        yield Written(f"{name}.hf_config_overrides.dtype", loaded, "params")
    unread = dict(find_unread(config, BLOCK, "sglang_cfg"))  # SGLang reads its section
    if sharded:
        for key, value in ((config.get("megatron_cfg") or {}).get("optimizer") or {}).items():
            if key.endswith("_dtype") and key != "params_dtype":  # which NeMo-RL's YAML files have
                unread["megatron_cfg", "optimizer", key] = value
    for keys, value in unread.items():
        yield _unread(name, keys, value, str(config.get("precision")) if sharded else None)
    adapters = (config.get("dtensor_cfg") or {}).get("lora_cfg") or {}
    if sharded and adapters.get("enabled"):
        kind = adapters.get("lora_dtype")
        yield Written(f"{name}.dtensor_cfg.lora_cfg.lora_dtype", kind, "params")


def _unread(name: str, keys: Keys, value: object, precision: str | None) -> Written:
    """What the user may mean by a key that NeMo-RL does not read.

    ``precision`` is that of the model's DTensor workers; ``None`` if Megatron trains it.
    """
    sharded, fixed = precision is not None, ""
    (near,) = get_close_matches(keys[-1], _MEANT, 1, 0.8) or ("",)
    sets, needs, place = _MEANT.get(near, ""), "", f"{name}.{'.'.join(keys)}"
    if keys[0] == "generation":
        needs = f"{name}.{'.'.join(keys[:2])}.precision={value}" if sets and len(keys) > 2 else ""
        sets = ""
    elif sets == COMPUTES and sharded:
        dtype = any_dtype(str(value))
        needs = "".join(f"{name}.precision={own}" for own in DTYPES if DTYPES[own] is dtype)
        fixed = name_of(DTYPES[precision]) if precision and precision in DTYPES else ""
    elif sets == COMPUTES:
        sets = "params"
    # NeMo-RL's FSDP reduces gradients, and returns a layer's output, in fp32.
    fixed = "fp32" if sharded and near in ("reduce_dtype", "output_dtype") else fixed
    return Written(place, value, sets, needs, read=False, fixed=fixed)


_MEANT = {
    **dict.fromkeys(("precision", "dtype", "param_dtype"), COMPUTES),
    **{f"{moment}_dtype": moment for moment in ("exp_avg", "exp_avg_sq")},
    **dict.fromkeys(("reduce_dtype", "output_dtype"), ""),
}
"""Maps names of dtype keys to what they set."""


def group_of(name: str, *, second: bool) -> str:
    """The group of the seams on a model's DTensor workers; ``second`` is ``dtensor_cfg._v2``."""
    return VALUE_V2 if name == "value" else V2 if second else V1


def scaled_because(name: str) -> str:
    """The reported reason for scaling a model's loss; ``name`` is the model's key."""
    return f"{name}.precision is float16, and NeMo-RL does not scale the loss"


def read_section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Read a config's optional scaler settings, with the fields of ``ScalerSettings`` as keys.

    Raises:
        SettingsError: a value is not allowed; the message has key, value and allowed values.
    """
    where = f"{versioned(FRAMEWORK, called='NeMo-RL')}, {name}.{BLOCK}"
    values = parse_settings(config.get(BLOCK) or {}, SETTINGS.values(), where)
    return {ours: values[key] for ours, key in SETTINGS.items() if key in values}


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
    with _outermost(call.instance, "train") as outermost:
        if not outermost or eval_mode:
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
    with _outermost(worker, "save") as outermost:
        training = _training_of(worker) if outermost and optimizer_path else None
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
    with _outermost(call.instance, "load") as outermost:
        result = call.proceed()
        training = _training_of(call.instance) if outermost and optimizer_path else None
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
