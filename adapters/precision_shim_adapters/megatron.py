"""Megatron-core, as every adapter of a framework on Megatron needs it.

Why these layers. ``DistributedDataParallel.__init__`` is the one place that every path to a
gradient bucket passes (a framework's own ``get_model``, mbridge, Megatron-Bridge), and it sees
the parameters that really go into the bucket. ``OptimizerConfig.__post_init__`` is the one that
every path into the config passes, subclasses and deferred validation included. Both are methods
of by-reference classes, so from-imports of the classes do not matter.

What is deliberately not patched: Megatron used without a framework of ours around it is left
alone by the bucket seam; ``get_megatron_optimizer`` of Megatron itself is not entered.

Delete when: Megatron's OptimizerConfig takes dtype names, and its DDP reads ``main_grads_dtype``.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from precision_shim.adapting import Call, current_settings, decide, seam, version_of, warn
from precision_shim.errors import InconsistentPrecisionError, UnsupportedPrecisionError
from precision_shim.rules.bucket import BucketChoice, choose_bucket
from precision_shim.rules.dtypes import coerce_dtype, coerce_dtypes, name_of
from precision_shim.rules.legality import FusedAdamSupport, check_dtypes, release
from precision_shim.rules.model import TrainableDtypes, trainable_dtypes
from precision_shim.rules.optimizer import OptimizerPlan

from .megatron_checkpoint import bucket_without_shim

_FUSED_ADAM_ARGUMENTS = (
    "master_weight_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "use_decoupled_grad",
)

CONFIG = "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__"
DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__"


# -- the model build that is under way -----------------------------------------------------


@dataclasses.dataclass
class Build:
    """One model being built by a framework, from its DDP to its optimizer.

    Attributes:
        framework: the framework's name.
        subject: tells for which model (``"actor"``), when asked.
        plan: the framework's translation: trainable dtypes and whether the distributed optimizer
            is used, to the optimizer's plan.
        bucket_set: whether the user wrote ``grad_reduce_in_fp32``.
        seen: trainable parameters of the model chunks that were put into a DDP so far.
        in_fp32: the bucket's ``grad_reduce_in_fp32`` once decided; Megatron asserts that all
            chunks of a model have the same DDP config.
        constant_scale: tells whether the config asks for a static ``loss_scale``.
        nan_check_set: whether the user wrote ``check_for_nan_in_grad``.
        fp16_gradients: whether the bucket came out as fp16, because the user wrote it so.
        trains: whether the model gets an optimizer; without one its bucket stays empty, and no
            mismatch is worth a warning.
    """

    framework: str
    subject: Callable[[], str]
    plan: Callable[[TrainableDtypes, bool], OptimizerPlan]
    bucket_set: bool = False
    seen: TrainableDtypes = dataclasses.field(default_factory=TrainableDtypes)
    in_fp32: bool | None = None
    constant_scale: Callable[[], bool] = bool
    nan_check_set: bool = False
    fp16_gradients: bool = False
    trains: bool = True

    def bucket_blockers(self) -> tuple[str, ...]:
        """Why the bucket rules a precision-aware optimizer out; see ``refuse_fp16_gradients``."""
        reason = "the user's grad_reduce_in_fp32=False makes the gradients fp16"
        return (reason,) if self.fp16_gradients else ()


_build: ContextVar[Build | None] = ContextVar("precision_shim_build", default=None)
_set_by_user: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""DDP modules whose bucket dtype the user wrote."""


def is_set_by_user(chunk: Any) -> bool:
    """Whether the user wrote the bucket dtype of a DDP module."""
    return bool(_set_by_user.get(chunk, False))


def current_build() -> Build | None:
    """The model build around this call, if a framework of ours is building one."""
    return _build.get()


@contextmanager
def building(build: Build) -> Iterator[Build]:
    """Say that a framework is building a model; an outer build of the same call wins."""
    outer = _build.get()
    if outer is not None:
        yield outer
        return
    token = _build.set(build)
    try:
        yield build
    finally:
        _build.reset(token)


# -- what is installed ---------------------------------------------------------------------


def megatron_label() -> str:
    """``"megatron-core 0.16.1"``, for messages."""
    return f"megatron-core {version_of('megatron-core', ('megatron',))}"


def coerced(written: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a framework's config has for the OptimizerConfig, dtype names as dtypes.

    As it stands there if ``dtype-coercion`` is not in force.

    Args:
        written: fields of Megatron's OptimizerConfig.
        where: framework and key, for messages.

    Raises:
        DtypeError: a name is unknown, or the dtype is not legal for its field.
    """
    if "dtype-coercion" not in current_settings().features:
        return dict(written)
    dtypes = coerce_dtypes(written, where=where)
    check_dtypes(dtypes, fused_adam_support(), where=where)
    return dtypes


def fused_adam_support() -> FusedAdamSupport:
    """Look at the FusedAdam that Megatron's precision-aware optimizer would use."""
    try:
        # The same import that Megatron's own check does.
        from transformer_engine.pytorch.optimizers import FusedAdam
    except ImportError:
        return FusedAdamSupport()
    from megatron.core.utils import get_te_version

    version = release(str(get_te_version()))
    known = inspect.signature(FusedAdam).parameters
    lacking = [name for name in _FUSED_ADAM_ARGUMENTS if name not in known]
    problem = ""
    if lacking:
        problem = f"TransformerEngine's FusedAdam has no argument {', '.join(lacking)}"
    return FusedAdamSupport(version, not lacking, problem)


# -- OptimizerConfig -----------------------------------------------------------------------


# Of two functions on one symbol the one that is defined first is beneath the other.
@seam(
    CONFIG,
    "bf16-dispatch",
    group="megatron",
    why="a precision-aware optimizer without TransformerEngine ends in a bare TypeError",
    delete_when="Megatron says what is missing",
    relies_on=("use_precision_aware_optimizer", "use_distributed_optimizer"),
    optional=True,
)
def refuse_what_cannot_run(call: Call) -> Any:
    """Name what is missing for a precision-aware optimizer that the user asked for.

    Megatron's dataclass runs it when a config is made, Megatron-Bridge's later when it is final.
    """
    config = call.instance
    if (
        config.use_precision_aware_optimizer
        and config.optimizer == "adam"  # Megatron rejects the others with a message of its own
        and config.use_distributed_optimizer
        and not config.optimizer_cpu_offload
    ):
        problem = fused_adam_support().problem
        if problem:
            raise UnsupportedPrecisionError(
                f"{megatron_label()}: use_precision_aware_optimizer=True cannot run: {problem}. "
                "It needs a TransformerEngine whose FusedAdam has the arguments "
                f"{', '.join(_FUSED_ADAM_ARGUMENTS)} (2.3 or newer for bf16 moments). Install "
                "one, or set use_precision_aware_optimizer to False."
            )
    return call.proceed()


@seam(
    CONFIG,
    "dtype-coercion",
    group="megatron",
    why="every path into OptimizerConfig runs it, subclasses and deferred checks included",
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1805",
    delete_when="Megatron's OptimizerConfig takes dtype names",
    relies_on=("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "main_grads_dtype"),
    optional=True,
)
def coerce_config(call: Call) -> Any:
    """Turn dtype names in an OptimizerConfig into dtypes, and refuse illegal ones."""
    where = megatron_label()
    dtypes = {}
    for field in dataclasses.fields(call.instance):
        if not field.name.endswith("_dtype"):
            continue
        value = getattr(call.instance, field.name)
        dtypes[field.name] = coerce_dtype(value, key=f"OptimizerConfig.{field.name}", where=where)
        if dtypes[field.name] is not value:
            setattr(call.instance, field.name, dtypes[field.name])
    check_dtypes(dtypes, fused_adam_support(), where=where)
    return call.proceed()


# -- DistributedDataParallel ---------------------------------------------------------------


@seam(
    DDP,
    "grad-bucket-alignment",
    group="megatron",
    why="every path to a gradient bucket passes here, with the live parameters at hand",
    upstream="https://github.com/verl-project/verl/pull/6526",
    delete_when="the bucket follows the main grads on every path upstream",
    relies_on=("grad_reduce_in_fp32",),
    optional=True,
)
def align_bucket(call: Call, ddp_config: Any, module: Any, full_param_layout: Any = None) -> Any:
    """Give the gradient bucket the dtype of the optimizer's main gradients.

    A framework's ``get_model``, mbridge and Megatron-Bridge put each chunk of a model into a DDP.
    """
    build = _build.get()
    if build is None:
        return call.proceed()
    model = trainable_dtypes(module.parameters())
    present = bool(ddp_config.grad_reduce_in_fp32)
    choice = _one_bucket_for_all(build, _choose(build, ddp_config, model), present)
    because, problem = choice.because, choice.problem
    in_force = present
    if choice.changed and getattr(ddp_config, "use_layer_wise_param_layout", False):
        problem = "the layer-wise optimizer's parameter layout is computed for the bucket as it is"
        because = "left as it is"
    elif choice.changed:
        in_force = choice.grad_reduce_in_fp32
        # A copy: the caller's config is the caller's, and other chunks share it.
        changed = copy.copy(ddp_config)
        changed.grad_reduce_in_fp32 = in_force
        call.arguments["ddp_config"] = changed
        # From 0.18 a layout may come along, computed for the bucket dtype that was there;
        # without one the DDP computes its own.
        if full_param_layout is not None:
            call.arguments["full_param_layout"] = None
    build.fp16_gradients = model.single is torch.float16 and not in_force
    _tell_bucket(build, model, in_force, because, problem)
    result = call.proceed()
    if build.bucket_set:
        _set_by_user[call.instance] = True
    if choice.changed and in_force is choice.grad_reduce_in_fp32:
        bucket_without_shim[call.instance] = present
    return result


def _choose(build: Build, ddp_config: Any, model: TrainableDtypes) -> BucketChoice:
    plan = build.plan(model, bool(ddp_config.use_distributed_optimizer))
    return choose_bucket(
        present=bool(ddp_config.grad_reduce_in_fp32),
        user_set=build.bucket_set,
        align=current_settings()["grad_bucket"] == "align",
        main_grads=plan.main_grads,
        model=model,
    )


def _one_bucket_for_all(build: Build, choice: BucketChoice, present: bool) -> BucketChoice:
    """The choice for the first chunk of a model, which holds for its others."""
    if build.in_fp32 is not None and choice.grad_reduce_in_fp32 != build.in_fp32:
        choice = dataclasses.replace(
            choice,
            grad_reduce_in_fp32=build.in_fp32,
            changed=present != build.in_fp32,
            because=f"as the model's first chunk; here {choice.because}",
        )
    build.in_fp32 = choice.grad_reduce_in_fp32
    return choice


def _tell_bucket(
    build: Build, model: TrainableDtypes, in_force: bool, because: str, problem: str
) -> None:
    dtype = "fp32" if in_force else "that of the parameters"
    if not in_force and model.single is not None:
        dtype = name_of(model.single)
    decide(
        build.framework,
        build.subject(),
        "grad-bucket-alignment",
        f"gradient bucket {dtype} (grad_reduce_in_fp32={in_force})",
        because,
    )
    if problem and build.trains:
        warn(f"{build.framework} {build.subject()}: {problem}.")


@seam(
    DDP,
    ("bf16-dispatch", "fp16-scaling"),
    group="megatron",
    why="the first place that sees the parameters an optimizer will train",
    delete_when="frameworks hand the model to the function that makes the OptimizerConfig",
    optional=True,
)
def observe_model(call: Call, module: Any) -> Any:
    """Note the trainable dtypes of a model chunk for the optimizer that will train it."""
    build = _build.get()
    if build is not None:
        build.seen = build.seen + trainable_dtypes(module.parameters())
    return call.proceed()


# -- config, parameters and buckets held against each other ---------------------------------


def _wrapped_chunks(model: Any) -> list[Any]:
    """The chunks of a model, one or a list, that are in a DDP with buckets of its own."""
    chunks = model if isinstance(model, list) else [model]
    return [one for one in chunks if hasattr(one, "buffers") and hasattr(one, "ddp_config")]


def _bucket_dtypes(chunks: list[Any]) -> set[torch.dtype]:
    return {
        buffer.grad_data.dtype
        for chunk in chunks
        for kind in ("buffers", "expert_parallel_buffers")
        for buffer in (getattr(chunk, kind) if isinstance(getattr(chunk, kind, ()), list) else ())
    }


def refuse_fp16_gradients(framework: str, config: Any, model: Any) -> None:
    """Refuse what ends in Megatron's bare assertion at the first step: its clipping.

    With the precision-aware optimizer ``clip_grad_by_total_norm_fp32`` takes fp32 and bf16
    gradients only, and they have the bucket's dtype.

    Args:
        framework: the framework's name.
        config: Megatron's OptimizerConfig.
        model: a DistributedDataParallel module, or a list of them.

    Raises:
        InconsistentPrecisionError: the gradients are fp16.
    """
    if not (config.use_precision_aware_optimizer and config.clip_grad):
        return
    if torch.float16 in _bucket_dtypes(_wrapped_chunks(model)):
        raise InconsistentPrecisionError(
            f"{framework}, {megatron_label()}: use_precision_aware_optimizer=True with "
            f"clip_grad={config.clip_grad} takes fp32 or bf16 gradients, and "
            "grad_reduce_in_fp32=False makes them fp16. Write grad_reduce_in_fp32: true, or set "
            "PRECISION_SHIM_GRAD_BUCKET=align, or use_precision_aware_optimizer: false."
        )


def check_pair(framework: str, config: Any, model: Any) -> None:
    """Hold an OptimizerConfig against the live parameters and buckets; warn where they disagree.

    Args:
        framework: the framework's name, for messages.
        config: Megatron's OptimizerConfig.
        model: a DistributedDataParallel module, or a list of them.

    Raises:
        InconsistentPrecisionError: they disagree, the user did not ask for it, and strict mode
            is on.
    """
    refuse_fp16_gradients(framework, config, model)
    chunks = _wrapped_chunks(model)
    buckets = _bucket_dtypes(chunks)
    live = TrainableDtypes()
    for chunk in chunks:
        live = live + trainable_dtypes(chunk.parameters())
    main_grads = config.main_grads_dtype if config.use_precision_aware_optimizer else torch.float32
    problems = []
    if buckets and buckets != {main_grads}:
        found = ", ".join(sorted(map(name_of, buckets)))
        problems.append(
            f"the optimizer expects {name_of(main_grads)} main grads, the gradient bucket is "
            f"{found}"
        )
    if live.single is not None and live.single is not config.params_dtype:
        problems.append(
            f"the OptimizerConfig is for {name_of(config.params_dtype)} parameters, the trainable "
            f"parameters are {live}"
        )
    if not problems:
        return
    by_user = any(_set_by_user.get(chunk, False) for chunk in chunks)
    message = (
        f"{framework}, {megatron_label()}: {'; '.join(problems)}. Pass the model's dtype "
        "(fp16=, bf16=) and the same override_ddp_config['grad_reduce_in_fp32'] to the functions "
        "that build model and optimizer, or leave both to the shim."
    )
    if current_settings().strict and not by_user:
        raise InconsistentPrecisionError(message)
    warn(message)
