"""Patch the functions in which verl builds a model on Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import wrapt

from precision_shim.adapting import Call, Seam, Settings, Symbol, current_settings, look, seam
from precision_shim.adapting.dtypes import name_of, parse_dtype

from ... import megatron
from ...megatron.policy.optimizer_plan import PRECISION_AWARE_FIELDS
from .. import config as reader
from .native import native_dispatch

PULL = "https://github.com/verl-project/verl/pull/6526"
_ALIGNED = "https://github.com/verl-project/verl/pull/7485"
LEGACY = "verl.workers.megatron_workers"
_ONE_PLACE = "verl decides bucket and optimizer states in one place"


def native_fields(symbol: Symbol, settings: Settings) -> str | None:
    """Return a reason to skip the seam if verl's dataclass has fields for the states' dtypes."""
    if "use_precision_aware_optimizer" in symbol.parameters:
        return "verl's optimizer config has the fields"
    return None


def native_bucket(symbol: Symbol, settings: Settings) -> str | None:
    """Return, as text for ``status()``, how verl 0.9 itself sets the gradient bucket's dtype."""
    if "use_low_precision_main_grads" in symbol.names:  # since 0.9.1
        return (
            "verl aligns the bucket with the fields of its optimizer config; it ignores "
            "override_optimizer_config and the fp16 engine, and the shim aligns the DDP for these"
        )
    return (
        "verl aligns the bucket for the bf16 opt-in only; the shim aligns the DDP for everything "
        "else (Megatron-Bridge's bf16 and fp16 default buckets)"
    )


class _WithOverrides(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """verl's optimizer config with another ``override_optimizer_config``.

    verl's configs are frozen dataclasses, or OmegaConf nodes, which cannot contain a dtype.
    """

    def __init__(self, wrapped: Any, overrides: Mapping[str, Any]) -> None:
        super().__init__(wrapped)
        self._self_overrides = dict(overrides)

    @property
    def override_optimizer_config(self) -> dict[str, Any]:
        return dict(self._self_overrides)

    def get(self, key: str, default: Any = None) -> Any:
        return (
            self[key]
            if key == reader.OVERRIDES
            else reader.read_key(self.__wrapped__, key, default)
        )

    def __getitem__(self, key: str) -> Any:
        return dict(self._self_overrides) if key == reader.OVERRIDES else self.__wrapped__[key]


@seam(
    reader.CONFIG,
    megatron.DISPATCH,
    group="megatron",
    why="the one function that makes verl's OptimizerConfig, for actor and critic",
    upstream=PULL,
    delete_when="verl >= 0.9 is the oldest in use, whose config has the opt-in",
    relies_on=("override_optimizer_config", "params_dtype"),
    native=native_dispatch,
)
@seam(
    reader.CONFIG,
    "dtype-coercion",
    group="megatron",
    why="override_optimizer_config reaches Megatron as YAML wrote it, strings included",
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1805",
    delete_when="verl coerces override_optimizer_config itself",
    relies_on=("override_optimizer_config",),
)
@seam(
    reader.CONFIG,
    megatron.SCALING,
    group="megatron",
    why="its override merge is the one way to fields that verl's fp16 branch sets",
    delete_when="verl's optimizer config has fields for the loss scaler",
    relies_on=("override_optimizer_config", "initial_loss_scale"),
)
def configure(
    call: Call,
    optim_config: Any,
    fp16: Any,
    bf16: Any = True,
    use_distributed_optimizer: Any = True,
) -> Any:
    """Set the fields of verl's OptimizerConfig that depend on the model's dtype.

    verl calls this for each trained model, after the DDP is built; before 0.9 without ``bf16``.
    """
    flagged = torch.float16 if fp16 else torch.bfloat16 if bf16 else torch.float32
    build = megatron.current_build("verl")
    if build is None:
        distributed = bool(use_distributed_optimizer)
        build = megatron.Build(
            "verl",
            lambda: reader.read_requested(optim_config, declared=flagged, distributed=distributed),
        )
    native = native_dispatch(look(reader.CONFIG), current_settings()) is not None
    plan = megatron.apply_plan(build, native=native)
    if plan.fields:
        call.arguments["optim_config"] = _WithOverrides(optim_config, plan.fields)
    if plan.by_user is not None:
        dtype = plan.dtype or flagged
        call.arguments["fp16"] = dtype is torch.float16
        call.arguments["bf16"] = dtype is torch.bfloat16
        if "bf16" not in call.parameters:
            del call.arguments["bf16"]
    made = call.proceed()
    megatron.keep_layout(plan, made)
    return made


@seam(
    reader.FIELDS,
    megatron.DISPATCH,
    group="megatron",
    why="brings the fields of verl 0.9's opt-in to versions whose config lacks them",
    upstream=PULL,
    delete_when="verl >= 0.9 is the oldest in use",
    relies_on=("override_optimizer_config",),
    native=native_fields,
    optional=True,
)
def accept_fields(call: Call) -> Any:
    """Accept verl 0.9's fields for the states' dtypes if verl's dataclass lacks them."""
    extra = {
        key: reader.read_field(key, call.arguments.pop(key))
        for key in PRECISION_AWARE_FIELDS
        if key in call.arguments
    }
    result = call.proceed()
    for key, value in extra.items():
        # verl's configs must stay serializable
        setattr(call.instance, key, name_of(value) if isinstance(value, torch.dtype) else value)
    return result


@seam(
    reader.FIELDS,
    "dtype-coercion",
    group="megatron",
    why="verl's fields know five spellings; the others end in an AssertionError",
    delete_when="verl's fields take every spelling",
    relies_on=("override_optimizer_config",),
    optional=True,
)
def spell_fields(call: Call) -> Any:
    """Replace dtype names in the fields for the states' dtypes by spellings that verl accepts."""
    aware = megatron.PRECISION_AWARE
    if aware in call.arguments:
        call.arguments[aware] = reader.read_field(aware, call.arguments[aware])
    for key in PRECISION_AWARE_FIELDS[1:]:
        value = call.arguments.get(key)
        dtype = parse_dtype(value) if isinstance(value, str) else value
        if isinstance(dtype, torch.dtype):
            call.arguments[key] = name_of(dtype)
    return call.proceed()


@seam(
    f"{reader.MEGATRON}.initialize",
    megatron.BUILDING,
    group="megatron",
    why="the engine around both decisions; knows dtype, optimizer and DDP config",
    delete_when=_ONE_PLACE,
    relies_on=("param_dtype", "optimizer_config", "engine_config", "_build_optimizer"),
    optional=True,
)
def engine_build(call: Call) -> Any:
    """Record that an engine builds its model and optimizer; each worker builds only once."""
    with megatron.building("verl", lambda: reader.of_engine(call.instance)):
        return call.proceed()


@seam(
    feature=megatron.BUILDING,
    at=[
        {
            "target": f"{LEGACY}:ActorRolloutRefWorker._build_model_optimizer",
            "why": "0.7.1's default actor builds model and optimizer in this one method",
        },
        {
            "target": f"{LEGACY}:CriticWorker._build_critic_model_optimizer",
            "why": "0.7.1's default critic builds model and optimizer in this one method",
        },
    ],
    group="legacy workers",
    delete_when=_ONE_PLACE,
    relies_on=("dtype", "init_megatron_optim_config"),
    optional=True,
)
def legacy_build(call: Call, optim_config: Any, override_ddp_config: Any) -> Any:
    """Record that a worker of verl 0.7.1 builds a model."""
    worker = call.instance
    actor = reader.read_key(worker.config, "actor")
    config = (worker.config if actor is None else actor).megatron

    with megatron.building(
        "verl",
        lambda: reader.read_requested(
            optim_config,
            override_ddp_config,
            subject="critic" if actor is None else "actor",
            declared=getattr(worker, "dtype", None),
            distributed=bool(reader.read_key(config, "use_distributed_optimizer", True)),
        ),
    ):
        return call.proceed()


@seam(
    "verl.utils.megatron_utils:get_model",
    megatron.ALIGNMENT,
    group="megatron",
    why="a direct caller is taken at its model's dtype",
    upstream=PULL,
    delete_when="get_model aligns the bucket itself",
    aliases=(f"{LEGACY}:get_model",),
)
@seam(
    "verl.utils.megatron_utils:make_megatron_module",
    megatron.ALIGNMENT,
    group="megatron",
    why="the same for mbridge and the Megatron-Bridge provider",
    upstream=_ALIGNED,
    delete_when="make_megatron_module aligns the bucket itself",
)
def direct_build(call: Call, override_ddp_config: Any) -> Any:
    """Record that a model is being built, unless an engine or worker already recorded this."""
    with megatron.building("verl", lambda: reader.read_requested(None, override_ddp_config)):
        return call.proceed()


@seam(
    "verl.utils.megatron.optimizer:get_megatron_optimizer",
    megatron.ALIGNMENT,
    group="megatron",
    why="the first call that has config, parameters and buckets in hand",
    delete_when="Megatron checks main_grads_dtype against the bucket",
)
def check_optimizer(call: Call, model: Any, config: Any) -> Any:
    """Compare the OptimizerConfig with the live model before verl builds the optimizer."""
    megatron.check("verl", config, model)
    return call.proceed()


NATIVE = Seam(
    target=f"{reader.MEGATRON}._resolve_override_ddp_config",
    feature=megatron.ALIGNMENT,
    wrapper=None,
    group="native",
    why="verl's own alignment, left alone; the DDP seam adds what it leaves out",
    upstream=_ALIGNED,
    native=native_bucket,
    optional=True,
)
"""The seam that reports in ``status()`` how verl 0.9 itself sets the gradient bucket's dtype."""
