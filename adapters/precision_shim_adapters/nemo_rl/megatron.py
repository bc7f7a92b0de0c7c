"""NeMo-RL on Megatron: translations between its policy config and the rules.

A policy config carries the optimizer's fields as they go to Megatron-Bridge, so a key that is there
is the user's. The shipped YAML files carry nearly all of them, ``grad_reduce_in_fp32`` among them,
which NeMo-RL reads without a default. Bridge's own check of gradients is switched on by NeMo-RL
itself, and by no key.

NeMo-RL takes a step that Megatron skipped for what it is; only the missing grad norm ends its
``train`` (policy worker) or is reported as 0 (value worker). So a skipped step is handed to it as
it is, with grad norm NaN.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from precision_shim.adapting import (
    current_settings,
    decide,
    in_force,
    parse_settings,
    version_of,
    warn,
)
from precision_shim.errors import InconsistentPrecisionError, SettingsError
from precision_shim.rules.dtypes import parse_dtype
from precision_shim.rules.model import TrainableDtypes
from precision_shim.rules.optimizer import ROWS, OptimizerPlan, OptimizerRequest, plan_optimizer

from .. import megatron_checkpoint, megatron_overflow
from ..megatron import (
    Build,
    building,
    coerced,
    current_build,
    fused_adam_support,
    refuse_fp16_gradients,
)
from ..megatron_overflow import SCALER_FIELDS
from ..ray_actors import put_in_front
from .dtensor import BLOCK, FRAMEWORK, TRAIN

_DDP = "distributed_data_parallel_config"
_FP16_OWN = ("initial_loss_scale", "min_loss_scale")
"""Of the fp16 row what is no optimizer state: it belongs to the scaler."""


def _where(subject: str) -> str:
    role = "value" if subject == "value" else "policy"
    return f"nemo-rl {version_of(FRAMEWORK, ('nemo_rl',))}, {role}.megatron_cfg"


# -- the plan ---------------------------------------------------------------------------------


class _NemoBuild(Build):
    """The build of a worker's model; reads the worker's config."""

    def __init__(
        self, config: Mapping[str, Any], container: Any, subject: str, trains: bool = True
    ) -> None:
        self.config = config
        self.container = container
        self.distributed = True
        super().__init__(
            FRAMEWORK,
            lambda: subject,
            self._plan,
            bucket_set="grad_reduce_in_fp32" in self._megatron[_DDP],
            constant_scale=lambda: not self._dynamic_scale(),
            trains=trains,
        )

    @property
    def _megatron(self) -> Mapping[str, Any]:
        section: Mapping[str, Any] = self.config["megatron_cfg"]
        return section

    @property
    def written(self) -> dict[str, Any]:
        """What the config says of the optimizer, as it is there."""
        section = self._megatron["optimizer"]
        return {str(key): section[key] for key in section}

    @property
    def asked(self) -> dict[str, Any]:
        """The same with dtype names coerced, if that feature is in force.

        Raises:
            DtypeError: names the key below ``megatron_cfg.optimizer``.
        """
        return coerced(self.written, f"{_where(self.subject())}.optimizer")

    @property
    def declared(self) -> torch.dtype | None:
        """``policy.precision``; only for parameters of several dtypes, or none at hand."""
        return parse_dtype(str(self.config["precision"]))

    def _dynamic_scale(self) -> bool:
        """Whether Megatron will make a dynamic scaler: it goes by ``fp16`` of its config."""
        if self.written.get("loss_scale"):
            return False
        open_ = in_force(FRAMEWORK, "bf16-dispatch", "megatron")
        return bool(self.written.get("fp16", open_))

    def for_reference(self) -> _NemoBuild:
        """The same config for the model that nothing trains."""
        return _NemoBuild(self.config, self.container, "reference", trains=False)

    def fields(self) -> tuple[OptimizerPlan, dict[str, Any]]:
        """The plan for the model that was seen, and the fields that it adds to the config's."""
        plan = self._plan(self.seen, self.distributed)
        asked = self.asked
        return plan, {key: value for key, value in plan.adds.items() if key not in asked}

    def _plan(self, model: TrainableDtypes, distributed: bool) -> OptimizerPlan:
        self.distributed = distributed
        states = str(current_settings()["optimizer_states"])
        asked = self.asked
        return plan_optimizer(
            OptimizerRequest(
                model=model,
                declared=self.declared,
                asked=asked,
                # The config has the fields, so "auto" takes it at its word.
                policy="as-configured" if states == "auto" else states,
                optimizer=str(asked.get("optimizer", "adam")),
                distributed=bool(asked.get("use_distributed_optimizer", distributed)),
                support=fused_adam_support(),
                blockers=self._blockers(),
                aligned=self._aligned(),
                whole_masters=in_force(FRAMEWORK, "bf16-dispatch", megatron_checkpoint.STATES),
            )
        )

    def _blockers(self) -> tuple[str, ...]:
        found = list(self.bucket_blockers())
        fp8 = self._megatron.get("fp8_cfg") or {}
        if fp8.get("enabled") and fp8.get("fp8_recipe") != "delayed":
            found.append(f"fp8_cfg.fp8_recipe is {fp8.get('fp8_recipe')!r}, not 'delayed'")
        if getattr(self.container.ddp, "use_megatron_fsdp", False):
            found.append("Megatron-FSDP keeps gradients and states in its own buffers")
        return tuple(found)

    def _aligned(self) -> bool:
        """Whether low-precision main grads would find a bucket of their dtype."""
        if not self._megatron[_DDP].get("grad_reduce_in_fp32", False):
            return True
        align = not self.bucket_set or current_settings()["grad_bucket"] == "align"
        return align and in_force(FRAMEWORK, "grad-bucket-alignment", "megatron")


# -- which model is being built ----------------------------------------------------------------


_builds: list[tuple[weakref.ref[Any], _NemoBuild]] = []
"""DDP configs of NeMo-RL's workers, to the build that they were used in."""


def _known(ddp_config: Any) -> _NemoBuild | None:
    return next((build for config, build in _builds if config() is ddp_config), None)


def worker_build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around the function that makes a worker's model and its optimizer."""
    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    container = given["cfg"] if "cfg" in given else given["megatron_cfg"]
    # Only the value worker has a hook of its own, which puts the value head in place.
    subject = "value" if given.get("additional_pre_wrap_hooks") else "policy"
    # A teacher's has none.
    trains = bool(given.get("load_optimizer", True))
    build = _NemoBuild(given["policy_cfg"], container, subject, trains)
    _builds[:] = [one for one in _builds if one[0]() not in (None, container.ddp)]
    _builds.append((weakref.ref(container.ddp), build))
    with building(build):
        return wrapped(*args, **kwargs)


def reference_build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around a DDP outside any build: the reference model comes with the policy's DDP config.

    Up to 0.5 it is built inside the worker's ``__init__``, which Ray takes along by value.
    """
    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    build = _known(given["ddp_config"]) if current_build() is None else None
    if build is None:
        return wrapped(*args, **kwargs)
    with building(build.for_reference()):
        return wrapped(*args, **kwargs)


# -- the optimizer -----------------------------------------------------------------------------


def _with(config: Any, fields: Mapping[str, Any]) -> Any:
    """A copy of an OptimizerConfig with other fields, checked anew; itself if nothing differs."""
    lacking = object()
    fields = {
        key: value
        for key, value in fields.items()
        if getattr(config, key, lacking) not in (value, lacking)
    }
    if not fields:
        return config
    config = copy.copy(config)
    for key, value in fields.items():
        setattr(config, key, value)
    # From 0.5 Bridge defers the check and what is computed from the fields.
    check = getattr(config, "finalize", None) or config.__post_init__
    check()
    return config


def dispatch(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let the OptimizerConfig follow the model in what the policy config leaves open."""
    build = current_build()
    if not isinstance(build, _NemoBuild):
        return wrapped(*args, **kwargs)
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    plan, fields = build.fields()
    decide(FRAMEWORK, build.subject(), "bf16-dispatch", plan.chosen, plan.because)
    for text in plan.warnings:
        warn(f"{FRAMEWORK} {build.subject()}: {text}")
    config = _with(bound.arguments["optimizer_config"], fields)
    by_user = "use_precision_aware_optimizer" not in fields
    megatron_checkpoint.note_precision_aware(config, by_user=by_user)
    bound.arguments["optimizer_config"] = config
    return wrapped(*bound.args, **bound.kwargs)


def scale(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Give Megatron's scaler its settings, and remember whose optimizer it belongs to.

    Raises:
        InconsistentPrecisionError: an fp16 model's gradients cannot be clipped; or it would train
            unscaled, and strict mode is on.
        SettingsError: the first scale is below the scaler's minimum.
    """
    build = current_build()
    if not isinstance(build, _NemoBuild):
        return wrapped(*args, **kwargs)
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    config = bound.arguments["optimizer_config"]
    if (build.seen.single or build.declared) is torch.float16:
        _refuse_unscaled(build, config)
        refuse_fp16_gradients(_where(build.subject()), config, bound.arguments["model"])
        bound.arguments["optimizer_config"] = _with(config, _scaler_fields(build, config))
    optimizer, *rest = wrapped(*bound.args, **bound.kwargs)
    _owners[optimizer] = build.subject()
    return (optimizer, *rest)


def _refuse_unscaled(build: _NemoBuild, config: Any) -> None:
    if config.fp16 or getattr(config, "loss_scale", None):
        return
    where = _where(build.subject())
    message = (
        f"{where}.optimizer: fp16={config.fp16}, bf16={config.bf16}, but precision is float16: "
        "Megatron scales no loss then, and small gradients are lost. Set fp16 to true and bf16 "
        "to false there."
    )
    if current_settings().strict:
        raise InconsistentPrecisionError(message)
    decide(
        FRAMEWORK,
        build.subject(),
        megatron_overflow.FEATURE,
        "no loss scaling",
        f"megatron_cfg.optimizer.fp16={config.fp16} is the user's",
    )
    warn(message)


def _scaler_fields(build: _NemoBuild, config: Any) -> dict[str, Any]:
    """The scaler's fields that the config leaves open: block over variables over the row."""
    settings, written = current_settings(), build.written
    block_name = f"{_where(build.subject()).removesuffix('.megatron_cfg')}.{BLOCK}"
    block = parse_settings(build.config.get(BLOCK) or {}, SCALER_FIELDS, block_name)
    fields = {key: ROWS[torch.float16][key] for key in _FP16_OWN}
    for name, field in SCALER_FIELDS.items():
        if name in block:
            fields[field] = block[name]
        elif settings.is_set(name):
            fields[field] = settings[name]
    fields = {key: value for key, value in fields.items() if key not in written}
    first = fields.get("initial_loss_scale", config.initial_loss_scale)
    least = fields.get("min_loss_scale", config.min_loss_scale)
    if "initial_loss_scale" in fields and least is not None and first < least:
        raise SettingsError(
            f"{block_name}: the first loss scale {first:g} is below min_loss_scale={least:g} of "
            "Megatron's scaler. Raise loss_scale_init there or PRECISION_SHIM_LOSS_SCALE_INIT, or "
            "lower megatron_cfg.optimizer.min_loss_scale."
        )
    return fields


def keep_block(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``make_policy_like_config``, which takes a fixed list of a value config's keys."""
    made = wrapped(*args, **kwargs)
    config = args[0] if args else kwargs["config"]
    return {**made, BLOCK: config[BLOCK]} if BLOCK in config else made


# -- a skipped step, and the metrics --------------------------------------------------------------


_owners: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Optimizers of NeMo-RL's workers, to whose they are."""


def step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around the step of Megatron's optimizers: count what is NeMo-RL's."""
    subject = _owners.get(instance)
    if subject is None:
        return wrapped(*args, **kwargs)
    with megatron_overflow.skipping(FRAMEWORK, subject, succeeds=False):
        return wrapped(*args, **kwargs)


def report(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around a worker's ``train``: the loss scale and the skipped steps in its metrics.

    NeMo-RL passes on only the lists in ``all_mb_metrics``, and sums most of them over
    micro-batches and ranks: so each figure stands there once per call, on rank 0.
    """
    result = wrapped(*args, **kwargs)
    # Not by the signature: NeMo-RL's decorator for traces hides it.
    evaluated = {**dict(zip(TRAIN, args, strict=False)), **kwargs}.get("eval_mode")
    if not evaluated and torch.distributed.get_rank() == 0:
        for name, value in megatron_overflow.metrics(instance.optimizer).items():
            result["all_mb_metrics"][name] = [value]
    return result


# -- auxiliary losses -----------------------------------------------------------------------------


def times_loss_scale(function: Any, worker: Any) -> Any:
    """A worker's scale of an auxiliary loss's gradients, times the loss scale.

    From 0.7 NeMo-RL gives the losses of experts and of multi-token prediction scales of their own,
    and Megatron from 0.19 takes them in the place of the loss scale.
    """
    optimizer = worker.optimizer
    if function is None or hasattr(function, "_precision_shim"):
        return function
    if optimizer is None or not megatron_overflow.dynamic_scalers(optimizer):
        return function

    def scaled() -> Any:
        return function() * optimizer.get_loss_scale()

    scaled._precision_shim = True  # type: ignore[attr-defined]
    return scaled


def scale_own(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around a worker's ``_set_moe_grad_scale_func`` and ``_set_mtp_grad_scale_func``."""
    function = args[0] if args else kwargs["func"]
    return wrapped(times_loss_scale(function, instance))


# -- the actor class ------------------------------------------------------------------------------


class ReportingWorker:
    """Goes in front of a worker's class. It is importable, so Ray ships it by reference."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and report the loss scale where there is one."""
        return report(super().train, self, args, kwargs)  # type: ignore[misc]

    def _set_moe_grad_scale_func(self, func: Any) -> None:
        super()._set_moe_grad_scale_func(times_loss_scale(func, self))  # type: ignore[misc]

    def _set_mtp_grad_scale_func(self, func: Any) -> None:
        super()._set_mtp_grad_scale_func(times_loss_scale(func, self))  # type: ignore[misc]


def redecorate(actor_class: Any) -> Any:
    """Make an actor class of the same name and options whose worker reports its loss scale.

    Raises:
        SeamError: it is not what ``ray.remote`` makes of a class.
    """
    return put_in_front(ReportingWorker, actor_class)
