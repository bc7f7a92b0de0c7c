"""NeMo-RL on Megatron: translations between its policy config and the rules.

A policy config carries the optimizer's fields as they go to Megatron-Bridge, so a key that is there
is the user's. The shipped YAML files carry nearly all of them, ``grad_reduce_in_fp32`` among them,
which NeMo-RL reads without a default. Bridge's own check of gradients is switched on by NeMo-RL
itself, and by no key.

Why these layers. The function that makes a worker's model and optimizer has the policy config and
Bridge's in hand, for policy and value workers alike; Ray takes it along by reference, other than
the worker's own methods. The live parameters are looked at in Megatron's DDP. Bridge's
``setup_optimizer`` is where every kind of optimizer is made from the OptimizerConfig. Coercion
needs no place of its own: Bridge's OptimizerConfig of 0.4 runs Megatron's check when it is made,
and that of later versions in ``finalize()``, which the worker's ``validate()`` calls before
anything is built. Deliberately not patched: the conversion of a Hugging Face checkpoint, which
trains nothing.

NeMo-RL takes a step that Megatron skipped for what it is; only the missing grad norm ends its
``train`` (policy worker) or is reported as 0 (value worker). So a skipped step is handed to it as
it is, with grad norm NaN.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from precision_shim.adapting import (
    Call,
    around,
    current_settings,
    decide,
    in_force,
    parse_settings,
    seam,
    version_of,
    warn,
)
from precision_shim.errors import InconsistentPrecisionError, SettingsError
from precision_shim.rules.dtypes import parse_dtype
from precision_shim.rules.model import TrainableDtypes
from precision_shim.rules.optimizer import ROWS, OptimizerPlan, OptimizerRequest, plan_optimizer

from .. import megatron_checkpoint, megatron_overflow
from ..megatron import (
    DDP,
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
from .places import INLINE, MEGATRON, POLICIES, SETUP, VALUE

_DDP = "distributed_data_parallel_config"
_BUILDING = ("bf16-dispatch", "grad-bucket-alignment", megatron_overflow.FEATURE)
"""The features that need to know which model is being built."""
_ONE_PLACE = "NeMo-RL decides bucket and optimizer states in one place"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_SETUP_OPTIMIZER = "megatron.bridge.training.optim:setup_optimizer"
_SETUP_ALIASES = (
    "megatron.bridge.training.setup:setup_optimizer",
    *(f"{module}:setup_optimizer" for module in (*POLICIES, SETUP)),
)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_FP16_OWN = ("initial_loss_scale", "min_loss_scale")
"""The fp16 row's scaler fields."""


def _where(subject: str) -> str:
    role = "value" if subject == "value" else "policy"
    return f"nemo-rl {version_of(FRAMEWORK, ('nemo_rl',))}, {role}.megatron_cfg"


# -- the plan ---------------------------------------------------------------------------------


class _NemoBuild(Build):
    """The build of a worker's model; reads the worker's config."""

    def __init__(
        self, config: Mapping[str, Any], megatron_fsdp: bool, subject: str, trains: bool = True
    ) -> None:
        self.config = config
        self.megatron_fsdp = megatron_fsdp
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
        return _NemoBuild(self.config, self.megatron_fsdp, "reference", trains=False)

    def fields(self) -> tuple[OptimizerPlan, dict[str, Any]]:
        """The plan for the model that was seen, and the fields that it adds to the config's."""
        plan = self._plan(self.seen, self.distributed)
        asked = self.asked
        return plan, {key: value for key, value in plan.adds.items() if key not in asked}

    def _plan(self, model: TrainableDtypes, distributed: bool) -> OptimizerPlan:
        self.distributed = distributed
        states = str(current_settings()["optimizer_states"])
        # The config has the fields, so "auto" takes it at its word; and a bucket must not follow
        # states that nobody puts in force.
        follows = states != "auto" and in_force(FRAMEWORK, "bf16-dispatch", "megatron")
        asked = self.asked
        return plan_optimizer(
            OptimizerRequest(
                model=model,
                declared=self.declared,
                asked=asked,
                policy=states if follows else "as-configured",
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
        if self.megatron_fsdp:
            found.append("Megatron-FSDP keeps gradients and states in its own buffers")
        return tuple(found)

    def _aligned(self) -> bool:
        """Whether low-precision main grads would find a bucket of their dtype."""
        if not self._megatron[_DDP].get("grad_reduce_in_fp32", False):
            return True
        align = not self.bucket_set or current_settings()["grad_bucket"] == "align"
        return align and in_force(FRAMEWORK, "grad-bucket-alignment", "megatron")


# -- which model is being built ----------------------------------------------------------------


_builds: dict[int, tuple[weakref.ref[Any], _NemoBuild]] = {}
"""DDP configs of NeMo-RL's workers by id, each with the build that it was used in."""


def _known(ddp_config: Any) -> _NemoBuild | None:
    config, build = _builds.get(id(ddp_config), (None, None))
    return build if config is not None and config() is ddp_config else None


def _on_build(
    target: str,
    aliases: tuple[str, ...] = (),
    only_if: tuple[str, ...] = (),
    unless: tuple[str, ...] = (),
) -> Callable[[_Function], _Function]:
    """The function that makes model and optimizer; Ray takes it along by reference."""
    return seam(
        target,
        _BUILDING,
        group="megatron",
        why="model and optimizer are made here, from the policy config and Bridge's",
        delete_when=_ONE_PLACE,
        relies_on=("get_model", "setup_optimizer", "ddp", "optimizer"),
        aliases=aliases,
        optional=True,
        only_if=only_if,
        unless=unless,
    )


@_on_build(INLINE[0], only_if=(INLINE[0],))
@_on_build(INLINE[1], only_if=(INLINE[1],))
def worker_build_inline(call: Call, policy_cfg: Any, load_optimizer: Any, cfg: Any) -> Any:
    """Note that a worker of 0.4 or 0.5 builds its model and its optimizer, if it gets one."""
    with building(_new_build(policy_cfg, cfg, "policy", bool(load_optimizer))):
        return call.proceed()


@_on_build(
    f"{SETUP}:setup_model_and_optimizer",
    tuple(f"{module}:setup_model_and_optimizer" for module in (*POLICIES, VALUE)),
    unless=INLINE,
)
def worker_build(
    call: Call,
    policy_cfg: Any,
    load_optimizer: Any,
    megatron_cfg: Any,
    additional_pre_wrap_hooks: Any = None,
) -> Any:
    """Note that a worker builds its model and its optimizer; a teacher's has none."""
    # Only the value worker has a hook of its own, which puts the value head in place.
    subject = "value" if additional_pre_wrap_hooks else "policy"
    with building(_new_build(policy_cfg, megatron_cfg, subject, bool(load_optimizer))):
        return call.proceed()


def _new_build(policy_cfg: Any, container: Any, subject: str, trains: bool) -> _NemoBuild:
    ddp_config = container.ddp
    fsdp = bool(getattr(ddp_config, "use_megatron_fsdp", False))
    build = _NemoBuild(policy_cfg, fsdp, subject, trains)
    key = id(ddp_config)  # another worker's config may be equal, and is another build's

    def forget(gone: weakref.ref[Any]) -> None:
        if key in _builds and _builds[key][0] is gone:
            del _builds[key]

    _builds[key] = weakref.ref(ddp_config, forget), build
    return build


# Over what acts for a build: this module is collected after Megatron's own.
@seam(
    DDP,
    _BUILDING,
    group="megatron",
    why="the reference model is built outside that function, with the same DDP config",
    delete_when=_ONE_PLACE,
    optional=True,
)
def reference_build(call: Call, ddp_config: Any) -> Any:
    """Note that a DDP outside any build is the reference's: it has the policy's DDP config.

    Up to 0.5 it is built inside the worker's ``__init__``, which Ray takes along by value.
    """
    build = _known(ddp_config) if current_build() is None else None
    if build is None:
        return call.proceed()
    with building(build.for_reference()):
        return call.proceed()


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


# The scaler's part is the inner one, and so comes first: whether the optimizer is fp16 is settled
# by then.
@seam(
    _SETUP_OPTIMIZER,
    megatron_overflow.FEATURE,
    group="megatron",
    why="the scaler is made from these fields, and the optimizer comes out here",
    delete_when="NeMo-RL gives a loss scaler settings that suit a start at fp16",
    aliases=_SETUP_ALIASES,
    optional=True,
)
def scale(call: Call, optimizer_config: Any, model: Any) -> Any:
    """Give Megatron's scaler its settings, and remember whose optimizer it belongs to.

    Raises:
        InconsistentPrecisionError: an fp16 model's gradients cannot be clipped; or it would train
            unscaled, and strict mode is on.
        SettingsError: the first scale is below the scaler's minimum.
    """
    build = current_build()
    if not isinstance(build, _NemoBuild):
        return call.proceed()
    if (build.seen.single or build.declared) is torch.float16:
        _refuse_unscaled(build, optimizer_config)
        refuse_fp16_gradients(_where(build.subject()), optimizer_config, model)
        fields = _scaler_fields(build, optimizer_config)
        call.arguments["optimizer_config"] = _with(optimizer_config, fields)
    optimizer, *rest = call.proceed()
    _owners[optimizer] = build.subject()
    return (optimizer, *rest)


@seam(
    _SETUP_OPTIMIZER,
    "bf16-dispatch",
    group="megatron",
    why="the parameters are known, and the optimizer is not yet made",
    delete_when="NeMo-RL dispatches on policy.precision",
    aliases=_SETUP_ALIASES,
    optional=True,
)
def dispatch(call: Call, optimizer_config: Any) -> Any:
    """Let the OptimizerConfig follow the model in what the policy config leaves open."""
    build = current_build()
    if not isinstance(build, _NemoBuild):
        return call.proceed()
    plan, fields = build.fields()
    decide(FRAMEWORK, build.subject(), "bf16-dispatch", plan.chosen, plan.because)
    for text in plan.warnings:
        warn(f"{FRAMEWORK} {build.subject()}: {text}")
    config = _with(optimizer_config, fields)
    by_user = "use_precision_aware_optimizer" not in fields
    megatron_checkpoint.note_precision_aware(config, by_user=by_user)
    call.arguments["optimizer_config"] = config
    return call.proceed()


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


@seam(
    f"{SETUP}:make_policy_like_config",
    megatron_overflow.FEATURE,
    group="megatron",
    why="a value worker's config is copied key by key, without the shim's block",
    delete_when="it copies what it does not know",
    aliases=(f"{VALUE}:make_policy_like_config",),
    optional=True,
    only_if=(f"{SETUP}:make_policy_like_config",),
)
def keep_block(call: Call, config: Any) -> Any:
    """Take the shim's block along where a value worker makes itself a policy's config."""
    made = call.proceed()
    return {**made, BLOCK: config[BLOCK]} if BLOCK in config else made


# -- a skipped step, and the metrics --------------------------------------------------------------


_owners: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Optimizers of NeMo-RL's workers, to whose they are."""


def _on_step(optimizer: str) -> Callable[[_Function], _Function]:
    return seam(
        f"{_OPTIMIZER}:{optimizer}.step",
        megatron_overflow.FEATURE,
        group="megatron",
        why="a worker's train is out of reach in an actor, its optimizer's class is not",
        delete_when="NeMo-RL takes a skipped step's grad norm of None",
        optional=True,
    )


# Over the wrapper that answers for a skip, which asks whose step it is: collected after it.
@_on_step("ChainedOptimizer")
@_on_step("MixedPrecisionOptimizer")
def step(call: Call) -> Any:
    """Say that a step of one of Megatron's optimizers is NeMo-RL's, where it is."""
    subject = _owners.get(call.instance)
    if subject is None:
        return call.proceed()
    with megatron_overflow.skipping(FRAMEWORK, subject, succeeds=False):
        return call.proceed()


_METRICS_DELETE = "NeMo-RL reports the loss scale"
_RELIES_ON = ("train", "optimizer", "all_mb_metrics", "grad_norm", "eval_mode")


def _on_each_worker(
    method: str, why: str, delete_when: str, *relies_on: str
) -> Callable[[_Function], _Function]:
    """A method of the class beneath each worker, where this version has it."""

    def declare(function: _Function) -> _Function:
        for worker in reversed(MEGATRON):
            target = f"{worker.beneath}.{method}"
            seam(
                target,
                megatron_overflow.FEATURE,
                group=worker.group,
                why=why,
                delete_when=delete_when,
                relies_on=relies_on,
                optional=True,
                only_if=(*worker.only_if, target),
                unless=worker.unless,
            )(function)
        return function

    return declare


def _on_each_actor_class(function: _Function) -> _Function:
    for worker in reversed(MEGATRON):
        beneath = (f"{worker.beneath}.train",)
        for relies_on, only_if, unless in (
            (_RELIES_ON, (), beneath),
            ((f"{worker.name}Impl",), beneath, ()),
        ):
            seam(
                f"{worker.module}:{worker.name}",
                megatron_overflow.FEATURE,
                group=worker.group,
                why="the actor class, as NeMo-RL looks it up by name and Ray exports it",
                delete_when=_METRICS_DELETE,
                relies_on=relies_on,
                optional=True,
                replaces=True,
                only_if=(*worker.only_if, *only_if),
                unless=(*worker.unless, *unless),
            )(function)
    return function


@_on_each_worker(
    "train", "workers under other names inherit from this class", _METRICS_DELETE, *_RELIES_ON
)
def report(call: Call, eval_mode: Any = False) -> Any:
    """Put the loss scale and the skipped steps among the metrics of a worker's ``train``.

    NeMo-RL passes on only the lists in ``all_mb_metrics``, and sums most of them over
    micro-batches and ranks: so each figure stands there once per call, on rank 0.
    """
    result = call.proceed()
    if not eval_mode and torch.distributed.get_rank() == 0:
        for name, value in megatron_overflow.metrics(call.instance.optimizer).items():
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


_OWN_SCALE = "a scale of its own, which Megatron from 0.19 takes for the loss scale"


@_on_each_worker("_set_moe_grad_scale_func", _OWN_SCALE, "it has the loss scale in it")
@_on_each_worker("_set_mtp_grad_scale_func", _OWN_SCALE, "it has the loss scale in it")
def scale_own(call: Call, func: Any) -> Any:
    """Give a worker that sets a scale for its experts or its extra heads one times the loss's."""
    call.arguments["func"] = times_loss_scale(func, call.instance)
    return call.proceed()


# -- the actor class ------------------------------------------------------------------------------


class ReportingWorker:
    """Goes in front of a worker's class. It is importable, so Ray ships it by reference."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and report the loss scale where there is one."""
        method = super().train  # type: ignore[misc]
        return around(report, method, self, args, kwargs, positional=TRAIN)

    def _set_moe_grad_scale_func(self, func: Any) -> None:
        super()._set_moe_grad_scale_func(times_loss_scale(func, self))  # type: ignore[misc]

    def _set_mtp_grad_scale_func(self, func: Any) -> None:
        super()._set_mtp_grad_scale_func(times_loss_scale(func, self))  # type: ignore[misc]


@_on_each_actor_class
def redecorate(actor_class: Any) -> Any:
    """Make an actor class of the same name and options whose worker reports its loss scale.

    Raises:
        SeamError: it is not what ``ray.remote`` makes of a class.
    """
    return put_in_front(ReportingWorker, actor_class)
