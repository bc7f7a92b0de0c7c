"""SkyRL on Megatron: translations between SkyRL's configs and the rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch

from precision_shim.adapting import (
    Call,
    Settings,
    Symbol,
    current_settings,
    decide,
    in_force,
    look,
    seam,
    version_of,
    warn,
)
from precision_shim.rules.dtypes import name_of
from precision_shim.rules.legality import UNFUSED_PACKED_SINCE
from precision_shim.rules.model import TrainableDtypes
from precision_shim.rules.optimizer import ROWS, OptimizerPlan, OptimizerRequest, plan_optimizer

from .. import megatron, megatron_checkpoint
from ..megatron import Build, building, coerced, current_build, fused_adam_support
from .config import KWARGS, bucket_is_written, written_kwargs

_MTP = "skyrl.backends.skyrl_train.mtp.grad_clip:install_mtp_separate_grad_clip"
TRAIN = "skyrl.backends.skyrl_train"
WORKER = f"{TRAIN}.workers.megatron.megatron_worker"
OPTIMIZER = f"{TRAIN}.distributed.megatron.optimizer:init_megatron_optim_config"
_BUILDING = ("bf16-dispatch", "grad-bucket-alignment", "fp16-scaling")
"""The features that need to know which model is being built."""
_ONE_PLACE = "SkyRL decides bucket and optimizer states in one place"
_FP16_OWN = ("initial_loss_scale", "min_loss_scale")
"""The fp16 row's fields that hold whatever dtype the states have."""

_PRECISION_AWARE = "use_precision_aware_optimizer"
_PACKING = ("use_sample_packing", "remove_microbatch_padding")


def native_coercion(symbol: Symbol, settings: Settings) -> str | None:
    """SkyRL 0.3 turns dtype names into dtypes itself."""
    if "coerce_optimizer_dtype_kwargs" in symbol.names:
        return (
            "SkyRL coerces optimizer_config_kwargs; what the installed TransformerEngine rules out "
            "is refused at Megatron's OptimizerConfig"
        )
    return None


# -- reading SkyRL's config -------------------------------------------------------------------


def _where() -> str:
    return f"skyrl {version_of('skyrl', ('skyrl',))}"


def _plain(kwargs: Any) -> dict[str, Any]:
    """The caller's ``optimizer_config_kwargs`` as a new dict; ``None`` is an empty one."""
    return {} if kwargs is None else {str(key): kwargs[key] for key in kwargs}


def _coerced(kwargs: Any) -> dict[str, Any]:
    """The same with dtype names coerced, if that feature is in force.

    Raises:
        DtypeError: names the key below ``optimizer_config_kwargs``.
    """
    return coerced(_plain(kwargs), f"{_where()}, {KWARGS}")


def _passes_betas() -> bool:
    """Whether this SkyRL hands ``adam_betas`` on to Megatron (from 0.3)."""
    return "adam_beta2" in look(OPTIMIZER).names


# -- the plan ---------------------------------------------------------------------------------


def plan_for(
    optim_config: Any,
    kwargs: Any,
    *,
    written: frozenset[str] | None,
    model: TrainableDtypes,
    declared: torch.dtype | None,
    distributed: bool,
    blockers: tuple[str, ...] = (),
) -> tuple[OptimizerPlan, dict[str, Any]]:
    """Ask the rules what SkyRL's OptimizerConfig becomes.

    Args:
        optim_config: SkyRL's own optimizer config.
        kwargs: ``optimizer_config_kwargs``.
        written: its keys that the user wrote; ``None`` if that is not known.
        model: the trainable parameters.
        declared: dtype to go by where they are mixed or not known.
        distributed: whether the DDP has the distributed optimizer.
        blockers: why SkyRL cannot do with a precision-aware optimizer that the shim would add.

    Returns:
        The plan, and the kwargs that put it in force in SkyRL's own function: what the shim adds
        beneath what the user wrote.
    """
    states = str(current_settings()["optimizer_states"])
    policy = states
    if states == "auto" or not in_force("skyrl", "bf16-dispatch", "megatron"):
        policy = "as-configured"  # a bucket must not follow states that nobody puts in force
    user = _coerced(kwargs)
    if user.get("fp16") and user.get("bf16"):
        user["bf16"] = False  # fp16 wins where a caller passes both
    asked = dict(user)
    # The default is there in every config. It is no wish against the policy that the user asked
    # for by name, unless the user wrote it out, or may have.
    default = written is not None and _PRECISION_AWARE not in written
    if default and asked.get(_PRECISION_AWARE) is False:
        del asked[_PRECISION_AWARE]
    betas = getattr(optim_config, "adam_betas", None)
    if betas is not None and _passes_betas():
        asked.setdefault("adam_beta2", float(betas[1]))
    dtype = model.single or declared
    native = {}
    if dtype is torch.float16:
        native = {key: ROWS[torch.float16][key] for key in _FP16_OWN}
    plan = plan_optimizer(
        OptimizerRequest(
            model=model,
            declared=declared,
            asked=asked,
            policy=policy,
            optimizer=str(asked.get("optimizer", getattr(optim_config, "optimizer", "adam"))),
            distributed=bool(asked.get("use_distributed_optimizer", distributed)),
            support=fused_adam_support(),
            blockers=() if asked.get(_PRECISION_AWARE) else blockers,
            native=native,
            aligned=in_force("skyrl", "grad-bucket-alignment", "megatron"),
            whole_masters=in_force("skyrl", "bf16-dispatch", megatron_checkpoint.STATES),
        )
    )
    mine = {**native, **plan.adds}
    if mine.get(_PRECISION_AWARE) and _PRECISION_AWARE not in asked:
        user.pop(_PRECISION_AWARE, None)
    return plan, {**mine, **user}


# -- init_megatron_optim_config ---------------------------------------------------------------


# Dispatch is the inner layer, and so comes first: it reads coerced dtypes.
@seam(
    OPTIMIZER,
    "bf16-dispatch",
    group="megatron",
    why="the one function that makes SkyRL's OptimizerConfig; it hard-codes bf16",
    delete_when="it is given the model's dtype",
    relies_on=("bf16", "params_dtype", "update"),
    aliases=(f"{WORKER}:init_megatron_optim_config",),
    optional=True,
)
def dispatch(call: Call, optim_config: Any, optimizer_config_kwargs: Any) -> Any:
    """Make SkyRL's OptimizerConfig tell the truth about the model that it will train.

    A policy worker calls it once, after its DDP is built.
    """
    build = current_build()
    if isinstance(build, _SkyRLBuild):
        subject, model, distributed = build.subject(), build.seen, build.distributed
        written = build.written
        declared = build.declared
    else:
        subject, model, distributed, written = "direct caller", TrainableDtypes(), True, None
        declared = _declared_by(_plain(optimizer_config_kwargs))
    by_user = bool(_plain(optimizer_config_kwargs).get(_PRECISION_AWARE))
    plan, call.arguments[KWARGS] = plan_for(
        optim_config,
        optimizer_config_kwargs,
        written=written,
        model=model,
        declared=declared,
        distributed=distributed,
        blockers=build.blockers if isinstance(build, _SkyRLBuild) else (),
    )
    decide("skyrl", subject, "bf16-dispatch", plan.chosen, plan.because)
    for text in plan.warnings:
        warn(f"skyrl {subject}: {text}")
    made = call.proceed()
    megatron_checkpoint.note_precision_aware(made, by_user=by_user)
    return made


@seam(
    OPTIMIZER,
    "dtype-coercion",
    group="megatron",
    why="optimizer_config_kwargs reach Megatron as YAML wrote them, strings included",
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1805",
    delete_when="SkyRL >= 0.3 is the oldest in use",
    relies_on=("update",),
    aliases=(f"{WORKER}:init_megatron_optim_config",),
    native=native_coercion,
    optional=True,
)
def coerce_kwargs(call: Call, optimizer_config_kwargs: Any) -> Any:
    """Let dtype names in ``optimizer_config_kwargs`` work, and ``None`` for the whole of it."""
    call.arguments[KWARGS] = _coerced(optimizer_config_kwargs)
    return call.proceed()


def _declared_by(flags: Mapping[str, Any]) -> torch.dtype:
    """The dtype that a direct caller declares; SkyRL's own is bf16, and fp16 wins over it."""
    if flags.get("fp16"):
        return torch.float16
    return torch.bfloat16 if flags.get("bf16", True) else torch.float32


def dtype_to_build(kwargs: Mapping[str, Any]) -> torch.dtype:
    """The dtype that an OptimizerConfig is being made for."""
    build = current_build()
    if isinstance(build, _SkyRLBuild):
        return build.seen.single or build.declared
    return _declared_by(kwargs)


@seam(
    f"{TRAIN}.distributed.megatron.optimizer:get_megatron_optimizer",
    "grad-bucket-alignment",
    group="megatron",
    why="the first call that has config, parameters and buckets in hand",
    delete_when="Megatron checks main_grads_dtype against the bucket",
    aliases=(f"{WORKER}:get_megatron_optimizer",),
    optional=True,
)
def check_optimizer(call: Call, model: Any, config: Any) -> Any:
    """Hold the OptimizerConfig against the live model before the optimizer is built."""
    megatron.check_pair("skyrl", config, model)
    return call.proceed()


# -- which model is being built ----------------------------------------------------------------


class _SkyRLBuild(Build):
    """The build of a worker's model; reads the worker's config when asked."""

    def __init__(self, worker: Any, ddp_config: Any) -> None:
        super().__init__(
            "skyrl",
            lambda: _role(worker),
            self._plan,
            bucket_set=bucket_is_written(ddp_config),
            constant_scale=lambda: bool(_plain(self._kwargs).get("loss_scale")),
            # No field of SkyRL's dataclass; whoever passes a mapping wrote it.
            nan_check_set=isinstance(ddp_config, Mapping) and "check_for_nan_in_grad" in ddp_config,
        )
        self._worker = worker
        self.distributed = True

    @property
    def _megatron_config(self) -> Any:
        return getattr(self._worker.cfg, self.subject()).megatron_config

    @property
    def _kwargs(self) -> Any:
        return self._megatron_config.optimizer_config_kwargs

    @property
    def written(self) -> frozenset[str] | None:
        """Keys of ``optimizer_config_kwargs`` that the user wrote, where known."""
        return written_kwargs(self._megatron_config)

    @property
    def declared(self) -> torch.dtype:
        """What ``trainer.bf16`` says; only for parameters of several dtypes."""
        return torch.bfloat16 if self._worker.cfg.bf16 else torch.float32

    @property
    def blockers(self) -> tuple[str, ...]:
        """The bucket's, and what of SkyRL's own reads masters that FusedAdam keeps to itself."""
        found = list(self.bucket_blockers())
        if getattr(self._worker, "adapter_store", None) is not None:
            found.append("SkyRL's store of LoRA adapters copies the optimizer's own fp32 masters")
        if getattr(self._worker.provider, "mtp_num_layers", None) and look(_MTP).found:
            found.append("SkyRL clips a head for multi-token prediction by those masters")
        return tuple(found)

    def _plan(self, model: TrainableDtypes, distributed: bool) -> OptimizerPlan:
        self.distributed = distributed
        optim_config = getattr(self._worker.cfg, self.subject()).optimizer_config
        return plan_for(
            optim_config,
            self._kwargs,
            written=self.written,
            model=model,
            declared=self.declared,
            distributed=distributed,
            blockers=self.blockers,
        )[0]


def _role(worker: Any) -> str:
    return "ref" if "Ref" in type(worker).__name__ else "policy"


@seam(
    f"{WORKER}:MegatronPolicyWorkerBase.init_model",
    _BUILDING,
    group="megatron",
    why="around model and optimizer, with the worker's config",
    delete_when=_ONE_PLACE,
    relies_on=("make_megatron_module", "init_megatron_optim_config", "megatron_config"),
    optional=True,
)
def worker_build(call: Call) -> Any:
    """Note that a policy worker builds its model, until it has its optimizer."""
    worker = call.instance
    with building(_SkyRLBuild(worker, worker.cfg.policy.megatron_config.ddp_config)):
        return call.proceed()


@seam(
    f"{WORKER}:MegatronWorker.make_megatron_module",
    _BUILDING,
    group="megatron",
    why="a caller outside init_model gets the same bucket",
    delete_when=_ONE_PLACE,
    relies_on=("provide_distributed_model", "pipeline_dtype"),
    optional=True,
)
def module_build(call: Call, ddp_config: Any) -> Any:
    """Note the same for those who make a module outside ``init_model``."""
    worker = call.instance
    provider = worker.provider
    if provider.fp16 and provider.pipeline_dtype is torch.float32 and not worker.cfg.bf16:
        # SkyRL knows bf16 and fp32; stages of an fp16 model send one another fp16.
        provider.pipeline_dtype = torch.float16
    with building(_SkyRLBuild(worker, ddp_config)):
        return call.proceed()


# -- the model's dtype -------------------------------------------------------------------------


@dataclasses.dataclass
class _Flag:
    """``trainer.bf16``, and the checkpoint's dtype once the flag went over it."""

    bf16: bool
    over: torch.dtype | None = None


_flag: ContextVar[_Flag | None] = ContextVar("precision_shim_skyrl_flag", default=None)


@seam(
    f"{WORKER}:MegatronWorker.init_configs",
    "bf16-dispatch",
    group="megatron",
    why="knows trainer.bf16, which beside a bf16 or fp16 checkpoint is not obeyed",
    delete_when="init_configs sets the provider's dtype from its bf16 argument",
    relies_on=("to_megatron_provider", "transformer_config_kwargs", "finalize"),
    optional=True,
)
def note_flag(call: Call, bf16: Any) -> Any:
    """Hand ``bf16`` on to where the dtype of a worker's model is decided.

    What became of it is said afterwards: the user's own settings go over it.
    """
    flag = _Flag(bool(bf16))
    token = _flag.set(flag)
    try:
        result = call.proceed()
    finally:
        _flag.reset(token)
    worker = call.instance
    dtype = _dtype_of(worker.provider)
    if flag.over is not None:
        wanted = torch.bfloat16 if flag.bf16 else torch.float32
        own = "" if dtype is wanted else "transformer_config_kwargs go over "
        decide(
            "skyrl",
            _role(worker),
            "bf16-dispatch",
            f"model in {name_of(dtype)}",
            f"{own}trainer.bf16={flag.bf16}; the checkpoint is {name_of(flag.over)}",
        )
    if dtype is torch.float32:
        _warn_of_attention(worker)
    return result


def _dtype_of(provider: Any) -> torch.dtype:
    """What Megatron makes of a provider's flags: a cast of the whole model, or none."""
    if provider.fp16:
        return torch.float16
    return torch.bfloat16 if provider.bf16 else provider.params_dtype


def _warn_of_attention(worker: Any) -> None:
    """Say where TransformerEngine has no attention for an fp32 model.

    Its flash and fused attention take fp16 and bf16 alone. The unfused one is what is left, and has
    limits of its own. (SkyRL's ``attention_backend`` is a name, which Megatron compares with an
    enum: it chooses nothing.)
    """
    release = fused_adam_support().version
    if release is None:
        return
    found = []
    packing = next((key for key in _PACKING if getattr(worker.cfg, key, False)), None)
    if packing and release < UNFUSED_PACKED_SINCE:
        since = ".".join(map(str, UNFUSED_PACKED_SINCE))
        found.append(f"trainer.{packing}=true (packed sequences need TransformerEngine {since})")
    if worker.provider.context_parallel_size > 1:
        found.append("megatron_config.context_parallel_size above 1")
    if found:
        warn(
            f"{_where()} {_role(worker)}: the model is fp32. TransformerEngine's flash and fused "
            f"attention take fp16 and bf16 only, and its unfused one does not go with "
            f"{' or '.join(found)}: expect 'No dot product attention backend is available'. Turn "
            "that off, or train in bf16 (trainer.bf16=true)."
        )


@seam(
    "megatron.bridge.models.conversion.auto_bridge:AutoBridge.to_megatron_provider",
    "bf16-dispatch",
    group="megatron",
    why="the checkpoint's dtype is known, and the user's own settings come after",
    delete_when="init_configs sets the provider's dtype from its bf16 argument",
    optional=True,
)
def follow_flag(call: Call) -> Any:
    """Give a provider the dtype that ``trainer.bf16`` says, before the user's own settings.

    Megatron-Bridge takes the checkpoint's dtype. SkyRL's flag is ignored beside a bf16 checkpoint
    and contradicts an fp16 one; an fp16 checkpoint without the flag stays fp16.
    """
    provider = call.proceed()
    flag = _flag.get()
    if flag is None:
        return provider
    if provider.bf16 and not flag.bf16:
        wanted = torch.float32
    elif provider.fp16 and flag.bf16:
        wanted = torch.bfloat16
    else:
        return provider
    flag.over = provider.params_dtype
    if getattr(provider, "autocast_dtype", None) is flag.over:
        provider.autocast_dtype = wanted
    provider.params_dtype = wanted
    provider.bf16, provider.fp16 = wanted is torch.bfloat16, False
    return provider
