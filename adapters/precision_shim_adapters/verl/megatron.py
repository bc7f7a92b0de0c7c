"""verl on Megatron: translations between verl's configs and the rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import wrapt

from precision_shim.adapting import (
    Call,
    Seam,
    Settings,
    Symbol,
    current_settings,
    decide,
    in_force,
    seam,
    version_of,
    warn,
)
from precision_shim.rules.dtypes import coerce_dtype, name_of, parse_dtype
from precision_shim.rules.model import TrainableDtypes
from precision_shim.rules.optimizer import (
    PRECISION_AWARE_FIELDS,
    ROWS,
    OptimizerPlan,
    OptimizerRequest,
    plan_optimizer,
)

from .. import megatron, megatron_checkpoint
from ..megatron import Build, building, coerced, current_build, fused_adam_support

_KEY = "override_optimizer_config"
PULL = "https://github.com/verl-project/verl/pull/6526"
CONFIG = "verl.utils.megatron.optimizer:init_megatron_optim_config"
ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngine"
LEGACY = "verl.workers.megatron_workers"
_FIELDS = "verl.workers.config.optimizer:McoreOptimizerConfig.__init__"
_BUILDING = ("bf16-dispatch", "grad-bucket-alignment", "fp16-scaling")
"""The features that need to know which model is being built."""
_ONE_PLACE = "verl decides bucket and optimizer states in one place"


# -- what verl does itself ------------------------------------------------------------------


def native_dispatch(symbol: Symbol, settings: Settings) -> str | None:
    """verl 0.9's opt-in: there the config is taken at its word, unless follow-model is asked."""
    if "bf16" in symbol.parameters and settings["optimizer_states"] != "follow-model":
        return "verl dispatches on the dtype and has the opt-in in its own optimizer config"
    return None


def native_fields(symbol: Symbol, settings: Settings) -> str | None:
    """Whether McoreOptimizerConfig has the opt-in's fields."""
    if "use_precision_aware_optimizer" in symbol.parameters:
        return "verl's optimizer config has the fields"
    return None


def native_bucket(symbol: Symbol, settings: Settings) -> str | None:
    """verl 0.9's own alignment, which differs between 0.9.0 and 0.9.1."""
    if "use_low_precision_main_grads" in symbol.names:
        return (
            "verl aligns the bucket with the fields of its optimizer config; that it ignores "
            "override_optimizer_config and the fp16 engine is put right at the DDP"
        )
    return (
        "verl aligns the bucket for the bf16 opt-in only; everything else (Megatron-Bridge's "
        "bf16 and fp16 default buckets) is put right at the DDP"
    )


# -- reading verl's config ------------------------------------------------------------------


def _where() -> str:
    return f"verl {version_of('verl', ('verl',))}"


def _read(config: Any, key: str, default: Any = None) -> Any:
    """Read a key of a verl config: a dataclass with ``get``, an OmegaConf node, or a dict."""
    if config is None:
        return default
    get = getattr(config, "get", None)
    return get(key, default) if get is not None else getattr(config, key, default)


def _overrides(optim_config: Any) -> dict[str, Any]:
    """The user's ``override_optimizer_config`` as a new dict, dtype names coerced.

    Raises:
        DtypeError: names the key below ``override_optimizer_config``.
    """
    raw = _read(optim_config, _KEY) or {}
    return coerced({str(key): raw[key] for key in raw}, f"{_where()}, {_KEY}")


def _opt_in(optim_config: Any) -> dict[str, Any]:
    """The fields of verl 0.9's opt-in, as dtypes; empty where the config does not opt in."""
    if not _read(optim_config, "use_precision_aware_optimizer", False):
        return {}
    return {**dict.fromkeys(PRECISION_AWARE_FIELDS[1:], torch.float32), **_written(optim_config)}


def _written(optim_config: Any) -> dict[str, Any]:
    """Those of the opt-in's fields that the config carries, as dtypes."""
    fields = {key: _read(optim_config, key) for key in PRECISION_AWARE_FIELDS}
    return {
        key: coerce_dtype(value, key=f"optim.{key}", where=_where())
        for key, value in fields.items()
        if value is not None
    }


def _has_fields() -> bool:
    """Whether this verl's own function reads the opt-in's fields."""
    import verl.utils.megatron.optimizer as module

    return "bf16" in inspect.signature(module.init_megatron_optim_config).parameters


def _precision_aware_by_user(optim_config: Any) -> bool:
    """Whether this verl makes a precision-aware optimizer of the config by itself."""
    opt_in = _has_fields() and bool(_opt_in(optim_config))
    return bool(_overrides(optim_config).get("use_precision_aware_optimizer", opt_in))


def _policy() -> str:
    """What the setting means for this version of verl, in the rules' words."""
    if not in_force("verl", "bf16-dispatch", "megatron"):
        return "as-configured"  # a bucket must not follow states that nobody puts in force
    states = str(current_settings()["optimizer_states"])
    if states == "auto":
        return "as-configured" if _has_fields() else "guarded"
    return states


# -- the plan -------------------------------------------------------------------------------


def plan_for(
    optim_config: Any,
    model: TrainableDtypes,
    declared: torch.dtype | None,
    distributed: bool,
    blockers: tuple[str, ...] = (),
) -> tuple[OptimizerPlan, dict[str, Any]]:
    """Ask the rules what verl's OptimizerConfig becomes.

    Returns:
        The plan, and the overrides that put it in force in verl's own function: what the shim
        adds beneath what the user wrote.
    """
    policy = _policy()
    asked = _overrides(optim_config)
    dtype = model.single or declared
    beneath: dict[str, Any] = {}
    native: dict[str, Any] = {}
    if dtype is torch.float16:
        native = dict(ROWS[torch.float16])  # verl's own fp16 branch, in every version
    elif dtype is torch.bfloat16:
        if policy == "as-configured":
            # Without dispatch nobody brings the fields to a version that lacks them.
            brought = _has_fields() or in_force("verl", "bf16-dispatch", "megatron")
            native = _opt_in(optim_config) if brought else {}
            beneath = {} if _has_fields() else native
        else:
            # Where verl has the fields, False cannot be told from the default that the user asked
            # follow-model to go over; where it has not, whatever is there was written.
            own = _opt_in(optim_config) if _has_fields() else _written(optim_config)
            asked = {**own, **asked}
    plan = plan_optimizer(
        OptimizerRequest(
            model=model,
            declared=declared,
            asked=asked,
            policy=policy,
            optimizer=str(asked.get("optimizer", _read(optim_config, "optimizer", "adam"))),
            distributed=bool(asked.get("use_distributed_optimizer", distributed)),
            support=fused_adam_support(),
            blockers=blockers,
            native=native,
            aligned=in_force("verl", "grad-bucket-alignment", "megatron"),
            whole_masters=in_force("verl", "bf16-dispatch", megatron_checkpoint.STATES),
        )
    )
    return plan, {**beneath, **plan.adds, **asked}


# -- init_megatron_optim_config -------------------------------------------------------------


class _WithOverrides(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """verl's optimizer config with another ``override_optimizer_config``.

    verl's configs are frozen dataclasses or OmegaConf nodes, and neither may hold what is the
    caller's nor a ``torch.dtype``: so the caller's object stays as it is, and this one reads
    through to it.
    """

    def __init__(self, wrapped: Any, overrides: Mapping[str, Any]) -> None:
        super().__init__(wrapped)
        self._self_overrides = dict(overrides)

    @property
    def override_optimizer_config(self) -> dict[str, Any]:
        return dict(self._self_overrides)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key == _KEY else _read(self.__wrapped__, key, default)

    def __getitem__(self, key: str) -> Any:
        return dict(self._self_overrides) if key == _KEY else self.__wrapped__[key]


# Dispatch is the inner layer, and so comes first: it reads coerced dtypes.
@seam(
    CONFIG,
    "bf16-dispatch",
    group="megatron",
    why="the one function that makes verl's OptimizerConfig, for actor and critic",
    upstream=PULL,
    delete_when="verl >= 0.9 is the oldest in use, whose config has the opt-in",
    relies_on=("override_optimizer_config", "params_dtype"),
    native=native_dispatch,
)
def dispatch(
    call: Call,
    optim_config: Any,
    fp16: Any,
    bf16: Any = True,
    use_distributed_optimizer: Any = True,
) -> Any:
    """Make verl's OptimizerConfig follow the model; accept ``bf16=`` on every version.

    verl's engines and workers call it for each model that they train, after its DDP is built.
    """
    flagged = torch.float16 if fp16 else torch.bfloat16 if bf16 else torch.float32
    build = current_build()
    if not isinstance(build, _VerlBuild):  # another framework's is none of ours
        build = None
    subject = build.subject() if build is not None else "direct caller"
    distributed = bool(use_distributed_optimizer)
    if build is None:
        plan, overrides = plan_for(optim_config, TrainableDtypes(), flagged, distributed)
        dtype: torch.dtype | None = flagged
    else:
        declared = build.declared or flagged
        plan, overrides = plan_for(optim_config, build.seen, declared, distributed, build.blockers)
        dtype = build.seen.single or declared
    call.arguments["fp16"] = dtype is torch.float16
    if "bf16" in call.parameters:
        call.arguments["bf16"] = dtype is torch.bfloat16
    else:
        call.arguments.pop("bf16", None)
    call.arguments["optim_config"] = _WithOverrides(optim_config, overrides)
    decide("verl", subject, "bf16-dispatch", plan.chosen, plan.because)
    for text in plan.warnings:
        warn(f"verl {subject}: {text}")
    made = call.proceed()
    by_user = _precision_aware_by_user(optim_config)
    megatron_checkpoint.note_precision_aware(made, by_user=by_user)
    return made


@seam(
    CONFIG,
    "dtype-coercion",
    group="megatron",
    why="override_optimizer_config reaches Megatron as YAML wrote it, strings included",
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1805",
    delete_when="verl coerces override_optimizer_config itself",
    relies_on=("override_optimizer_config",),
)
def coerce_overrides(call: Call, optim_config: Any) -> Any:
    """Let dtype names in ``override_optimizer_config`` work."""
    overrides = _overrides(optim_config)
    if overrides:
        call.arguments["optim_config"] = _WithOverrides(optim_config, overrides)
    return call.proceed()


# -- McoreOptimizerConfig -------------------------------------------------------------------


@seam(
    _FIELDS,
    "bf16-dispatch",
    group="megatron",
    why="brings the fields of verl 0.9's opt-in to versions whose config lacks them",
    upstream=PULL,
    delete_when="verl >= 0.9 is the oldest in use",
    relies_on=("override_optimizer_config",),
    native=native_fields,
    optional=True,
)
def accept_fields(call: Call) -> Any:
    """Take the opt-in's fields where verl's dataclass lacks them."""
    extra = {
        key: call.arguments.pop(key) for key in PRECISION_AWARE_FIELDS if key in call.arguments
    }
    for key, value in extra.items():
        extra[key] = (
            coerce_dtype(value, key=f"optim.{key}", where=_where()) if "dtype" in key else value
        )
        if isinstance(extra[key], torch.dtype):
            extra[key] = name_of(extra[key])  # verl's configs hold names, and stay serializable
    result = call.proceed()
    for key, value in extra.items():
        setattr(call.instance, key, value)
    return result


@seam(
    _FIELDS,
    "dtype-coercion",
    group="megatron",
    why="verl's fields know five spellings; the others end in an AssertionError",
    delete_when="verl's fields take every spelling",
    relies_on=("override_optimizer_config",),
    optional=True,
)
def spell_fields(call: Call) -> Any:
    """Give verl's opt-in fields in a spelling that verl knows."""
    for key in PRECISION_AWARE_FIELDS[1:]:
        value = call.arguments.get(key)
        dtype = parse_dtype(value) if isinstance(value, str) else value
        if isinstance(dtype, torch.dtype):
            call.arguments[key] = name_of(dtype)
    return call.proceed()


# -- which model is being built --------------------------------------------------------------


class _VerlBuild(Build):
    """A build that also knows verl's config; what the rules need of it besides the parameters."""

    def __init__(
        self,
        subject: Callable[[], str],
        optim_config: Callable[[], Any],
        declared: Callable[[], torch.dtype | None],
        *,
        bucket_set: bool,
        nan_check_set: bool = False,
        blockers: tuple[str, ...] = (),
        distributed: bool = True,
    ) -> None:
        super().__init__(
            "verl",
            subject,
            self._plan,
            bucket_set,
            constant_scale=lambda: bool((_read(optim_config(), _KEY) or {}).get("loss_scale")),
            nan_check_set=nan_check_set,
        )
        # mbridge's DDP has the distributed optimizer on whatever verl's config says (0.7.1).
        self._distributed = distributed
        self._optim_config = optim_config
        self._declared = declared
        self._blockers = blockers

    @property
    def blockers(self) -> tuple[str, ...]:
        """Why the precision-aware optimizer cannot run in this engine."""
        return (*self._blockers, *self.bucket_blockers())

    @property
    def declared(self) -> torch.dtype | None:
        """The dtype that verl's worker or engine declares for the model."""
        return self._declared()

    def _plan(self, model: TrainableDtypes, distributed: bool) -> OptimizerPlan:
        both = distributed and self._distributed
        return plan_for(self._optim_config(), model, self.declared, both, self.blockers)[0]


def _set_by_user(ddp_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Which of the DDP's fields the user wrote in ``override_ddp_config``."""
    fields = {"bucket_set": "grad_reduce_in_fp32", "nan_check_set": "check_for_nan_in_grad"}
    return {name: field in (ddp_config or {}) for name, field in fields.items()}


@seam(
    f"{ENGINE}.initialize",
    _BUILDING,
    group="megatron",
    why="the engine around both decisions; knows dtype, optimizer and DDP config",
    delete_when=_ONE_PLACE,
    relies_on=("param_dtype", "optimizer_config", "engine_config", "_build_optimizer"),
    optional=True,
)
def engine_build(call: Call) -> Any:
    """Note that an engine builds its model and optimizer, which it does once, in a worker."""
    with building(_engine_build(call.instance)):
        return call.proceed()


def _engine_build(engine: Any) -> _VerlBuild:
    config = engine.engine_config
    blockers = []
    if _read(config, "use_megatron_fsdp", False):
        blockers.append("Megatron-FSDP keeps gradients and states in its own buffers")
    if _read(engine.optimizer_config, "use_layer_wise_distributed_optimizer", False):
        blockers.append("the layer-wise distributed optimizer (Muon) builds no FusedAdam")
    return _VerlBuild(
        lambda: "critic" if getattr(engine, "is_value_model", False) else "actor",
        lambda: engine.optimizer_config,
        lambda: getattr(engine, "param_dtype", None),
        # From 0.9 the engine itself adds the key on the way to the DDP: ask the config.
        **_set_by_user(_read(config, "override_ddp_config")),
        blockers=tuple(blockers),
        distributed=bool(_read(config, "use_distributed_optimizer", True)),
    )


@seam(
    f"{LEGACY}:ActorRolloutRefWorker._build_model_optimizer",
    _BUILDING,
    group="legacy workers",
    why="0.7.1's default actor builds model and optimizer in this one method",
    delete_when=_ONE_PLACE,
    relies_on=("dtype", "init_megatron_optim_config"),
    optional=True,
)
def legacy_actor_build(call: Call, optim_config: Any, override_ddp_config: Any) -> Any:
    """Note that 0.7.1's worker builds its actor (or a reference, which gets no optimizer)."""
    worker = call.instance
    config = worker.config.actor.megatron
    with building(_legacy("actor", config, worker, optim_config, override_ddp_config)):
        return call.proceed()


@seam(
    f"{LEGACY}:CriticWorker._build_critic_model_optimizer",
    _BUILDING,
    group="legacy workers",
    why="0.7.1's default critic builds model and optimizer in this one method",
    delete_when=_ONE_PLACE,
    relies_on=("dtype", "init_megatron_optim_config"),
    optional=True,
)
def legacy_critic_build(call: Call, optim_config: Any, override_ddp_config: Any) -> Any:
    """Note that 0.7.1's worker builds its critic."""
    worker = call.instance
    config = worker.config.megatron
    with building(_legacy("critic", config, worker, optim_config, override_ddp_config)):
        return call.proceed()


def _legacy(
    subject: str, config: Any, worker: Any, optim_config: Any, override_ddp_config: Any
) -> _VerlBuild:
    return _VerlBuild(
        lambda: subject,
        lambda: optim_config,
        lambda: getattr(worker, "dtype", None),
        **_set_by_user(override_ddp_config),
        distributed=bool(_read(config, "use_distributed_optimizer", True)),
    )


@seam(
    "verl.utils.megatron_utils:get_model",
    "grad-bucket-alignment",
    group="megatron",
    why="a direct caller is taken at its model's dtype",
    upstream=PULL,
    delete_when="get_model aligns the bucket itself",
    aliases=(f"{LEGACY}:get_model",),
)
@seam(
    "verl.utils.megatron_utils:make_megatron_module",
    "grad-bucket-alignment",
    group="megatron",
    why="the same for mbridge and the Megatron-Bridge provider",
    upstream="https://github.com/verl-project/verl/pull/7485",
    delete_when="make_megatron_module aligns the bucket itself",
)
def direct_build(call: Call, override_ddp_config: Any) -> Any:
    """Note that a model is built outside any engine; within one that engine's build goes on."""
    build = _VerlBuild(
        lambda: "direct caller",
        lambda: None,
        lambda: None,
        **_set_by_user(override_ddp_config),
    )
    with building(build):
        return call.proceed()


@seam(
    "verl.utils.megatron.optimizer:get_megatron_optimizer",
    "grad-bucket-alignment",
    group="megatron",
    why="the first call that has config, parameters and buckets in hand",
    delete_when="Megatron checks main_grads_dtype against the bucket",
)
def check_optimizer(call: Call, model: Any, config: Any) -> Any:
    """Hold the OptimizerConfig against the live model before the optimizer is built."""
    megatron.check_pair("verl", config, model)
    return call.proceed()


NATIVE = Seam(
    target=f"{ENGINE}._resolve_override_ddp_config",
    feature="grad-bucket-alignment",
    wrapper=None,
    group="native",
    why="verl's own alignment, left alone; the DDP seam adds what it leaves out",
    upstream="https://github.com/verl-project/verl/pull/7485",
    native=native_bucket,
    optional=True,
)
"""What verl does itself of the alignment."""
