"""SkyRL on Megatron: patch the functions that build a model."""

from __future__ import annotations

from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch

from precision_shim.adapting import (
    Call,
    Symbol,
    decide,
    holding,
    in_force,
    look,
    seam,
    versioned,
    warn,
)
from precision_shim.adapting.audit import tell_without_effect
from precision_shim.adapting.dtypes import ALIASES, DTYPES, name_of

from ... import megatron
from ...megatron import ALIGNMENT, BUILDING, DISPATCH, GROUP, SCALING, Build
from ...megatron.installed import fused_adam_support
from ...megatron.policy.legality import UNFUSED_PACKED_SINCE
from .. import config as reader

TRAIN = "skyrl.backends.skyrl_train"
WORKER = f"{TRAIN}.workers.megatron.megatron_worker"
_ONE_PLACE = "SkyRL decides bucket and optimizer states in one place"
_OBEYED = "init_configs sets the provider's dtype from its bf16 argument"
_PACKING = ("use_sample_packing", "remove_microbatch_padding")
_HERE: dict[str, Any] = {"group": GROUP, "optional": True}
_CONFIG: dict[str, Any] = {**_HERE, "aliases": (f"{WORKER}:init_megatron_optim_config",)}
_OWN_NAMES = [name for name in (*DTYPES, *ALIASES) if name.isidentifier()]


def native_coercion(symbol: Symbol, settings: Any) -> str | None:
    """Return a reason to skip the seam if SkyRL itself converts dtype names (since 0.3)."""
    if "coerce_optimizer_dtype_kwargs" in symbol.names:
        return (
            "SkyRL coerces optimizer_config_kwargs; what the installed TransformerEngine rules out "
            "is refused at Megatron's OptimizerConfig"
        )
    return None


def coerces_itself() -> bool:
    """Whether SkyRL itself turns dtype names in ``optimizer_config_kwargs`` into dtypes."""
    return native_coercion(look(reader.OPTIMIZER), None) is not None


def takes_name(name: str) -> bool:
    """Whether SkyRL, in a version that turns dtype names into dtypes, accepts ``name``."""
    return name.strip().lower() in _OWN_NAMES


def of_worker(worker: Any, ddp_config: Any) -> megatron.RequestedConfig:
    """Read the settings for a worker's model; the worker must already have its model provider."""
    return reader.read_requested(
        worker.cfg,
        _role(worker),
        ddp_config,
        heads=getattr(worker.provider, "mtp_num_layers", None),
        adapters=getattr(worker, "adapter_store", None) is not None,
    )


def _role(worker: Any) -> str:
    return "ref" if "Ref" in type(worker).__name__ else "policy"


@seam(
    reader.OPTIMIZER,
    DISPATCH,
    why="the one function that makes SkyRL's OptimizerConfig; it hard-codes bf16",
    delete_when="it is given the model's dtype",
    relies_on=("bf16", "params_dtype", "update"),
    **_CONFIG,
)
@seam(
    reader.OPTIMIZER,
    "dtype-coercion",
    why="optimizer_config_kwargs reach Megatron as YAML wrote them, strings included",
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1805",
    delete_when="SkyRL >= 0.3 is the oldest in use",
    relies_on=("update",),
    native=native_coercion,
    **_CONFIG,
)
@seam(
    reader.OPTIMIZER,
    SCALING,
    why="its kwargs are the one way to the scaler's fields",
    delete_when="SkyRL's optimizer config has fields for the loss scaler",
    relies_on=("update",),
    **_CONFIG,
)
def configure(call: Call, optim_config: Any, optimizer_config_kwargs: Any) -> Any:
    """Set the fields of SkyRL's OptimizerConfig that depend on the model's dtype.

    A policy worker calls ``init_megatron_optim_config`` once, after its DDP is built.
    """
    build = megatron.current_build("skyrl")
    if build is None:
        build = Build("skyrl", lambda: reader.of_caller(optim_config, optimizer_config_kwargs))
    plan = megatron.apply_plan(build)
    call.arguments[reader.KWARGS] = plan.fields
    made = call.proceed()
    megatron.keep_layout(plan, made)
    return made


@seam(
    f"{TRAIN}.distributed.megatron.optimizer:get_megatron_optimizer",
    ALIGNMENT,
    why="the first call that has config, parameters and buckets in hand",
    delete_when="Megatron checks main_grads_dtype against the bucket",
    aliases=(f"{WORKER}:get_megatron_optimizer",),
    **_HERE,
)
def check_optimizer(call: Call, model: Any, config: Any) -> Any:
    """Compare the OptimizerConfig with the live model before SkyRL builds the optimizer."""
    megatron.check("skyrl", config, model)
    return call.proceed()


@seam(
    f"{WORKER}:MegatronPolicyWorkerBase.init_model",
    BUILDING,
    why="around model and optimizer, with the worker's config",
    delete_when=_ONE_PLACE,
    relies_on=("make_megatron_module", "init_megatron_optim_config", "megatron_config", "cfg"),
    **_HERE,
)
def worker_build(call: Call) -> Any:
    """Record that a policy worker builds its model and optimizer."""
    worker = call.instance
    ddp_config = worker.cfg.policy.megatron_config.ddp_config
    with megatron.building("skyrl", lambda: of_worker(worker, ddp_config)):
        return call.proceed()


@seam(
    f"{WORKER}:MegatronWorker.make_megatron_module",
    BUILDING,
    why="a caller outside init_model gets the same bucket",
    delete_when=_ONE_PLACE,
    relies_on=("provide_distributed_model", "pipeline_dtype", "provider", "cfg"),
    **_HERE,
)
def module_build(call: Call, ddp_config: Any, wrap_with_ddp: Any = True) -> Any:
    """Record that a model is being built, even if code other than ``init_model`` builds it.

    Of a reference model, whose optimizer no audit can read, tell the dtype keys without effect.
    """
    worker = call.instance
    provider = worker.provider
    # SkyRL sets pipeline_dtype to bf16 or fp32, but fp16 pipeline stages exchange fp16.
    wrong = provider.pipeline_dtype is torch.float32 and not worker.cfg.bf16
    # If ``audit`` is the only feature, change nothing.
    features = (DISPATCH, ALIGNMENT, SCALING)
    if provider.fp16 and wrong and any(in_force("skyrl", name, GROUP) for name in features):
        provider.pipeline_dtype = torch.float16
    with megatron.building("skyrl", lambda: of_worker(worker, ddp_config)):
        chunks = call.proceed()
    if not wrap_with_ddp and in_force("skyrl", "audit", GROUP):
        role, parameters = _role(worker), (one for chunk in chunks for one in chunk.parameters())
        held = {"params": {name_of(one.dtype) for one in parameters}}
        tell_without_effect("skyrl", role, reader.not_read_by_megatron(worker.cfg, role), held)
    return chunks


_flag: ContextVar[Any] = ContextVar("precision_shim_skyrl_flag", default=None)
"""``bf16`` is ``trainer.bf16``; ``over``: the checkpoint's dtype if ``follow_flag`` set another."""


@seam(
    f"{WORKER}:MegatronWorker.init_configs",
    DISPATCH,
    why="knows trainer.bf16, which beside a bf16 or fp16 checkpoint is not obeyed, or only once "
    "the provider is settled",
    delete_when=_OBEYED,
    relies_on=("to_megatron_provider", "transformer_config_kwargs", "finalize", "provider", "cfg"),
    **_HERE,
)
def note_flag(call: Call, bf16: Any) -> Any:
    """Pass ``bf16`` to ``follow_flag``; report the dtype, which the user's kwargs may override."""
    flag = SimpleNamespace(bf16=bool(bf16), over=None)
    with holding(_flag, flag):
        result = call.proceed()
    worker = call.instance
    dtype = reader.dtype_of(worker.provider, flag.bf16)
    if flag.over is not None:
        wanted = torch.bfloat16 if flag.bf16 else torch.float32
        own = "" if dtype is wanted else "transformer_config_kwargs go over "
        because = f"{own}trainer.bf16={flag.bf16}; the checkpoint is {name_of(flag.over)}"
        decide("skyrl", _role(worker), DISPATCH, f"model in {name_of(dtype)}", because)
    if dtype is torch.float32:
        _warn_of_attention(worker)
    return result


def _warn_of_attention(worker: Any) -> None:
    """Warn if TransformerEngine has no attention backend for an fp32 model.

    SkyRL's ``attention_backend`` has no effect: it is a string that Megatron compares with an enum.
    """
    release = fused_adam_support().version
    if release is None:
        return
    reasons = []
    packing = next((key for key in _PACKING if getattr(worker.cfg, key, False)), None)
    if packing and release < UNFUSED_PACKED_SINCE:
        since = ".".join(map(str, UNFUSED_PACKED_SINCE))
        reasons.append(f"trainer.{packing}=true (packed sequences need TransformerEngine {since})")
    if worker.provider.context_parallel_size > 1:
        reasons.append("megatron_config.context_parallel_size above 1")
    if reasons:
        warn(
            f"{versioned('skyrl')} {_role(worker)}: the model is fp32. TransformerEngine's flash "
            f"and fused attention take fp16 and bf16 only, and its unfused one does not go with "
            f"{' or '.join(reasons)}: expect 'No dot product attention backend is available'. Turn "
            "that off, or train in bf16 (trainer.bf16=true)."
        )


@seam(
    "megatron.bridge.models.conversion.auto_bridge:AutoBridge.to_megatron_provider",
    DISPATCH,
    why="the checkpoint's dtype is known, and the user's own settings come after",
    delete_when=_OBEYED,
    **_HERE,
)
def follow_flag(call: Call) -> Any:
    """Set a provider's dtype from ``trainer.bf16``, before SkyRL applies the user's settings.

    Megatron-Bridge sets the checkpoint's dtype: ``bf16=false`` has no effect on a bf16 checkpoint,
    and ``bf16=true`` contradicts an fp16 one, which with ``bf16=false`` stays fp16.
    """
    provider = call.proceed()
    flag = _flag.get()
    if flag is None:
        return provider
    before = provider.params_dtype
    if reader.obey(provider, flag.bf16):
        flag.over = before
        if getattr(provider, "autocast_dtype", None) is before:
            provider.autocast_dtype = provider.params_dtype
    return provider
