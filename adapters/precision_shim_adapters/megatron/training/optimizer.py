"""Coerce dtypes in Megatron's OptimizerConfig, set fields, and compare the config with the model.

A framework's adapter calls ``apply_plan`` where the framework fills the config, and ``check`` where
it makes the optimizer. Megatron's ``get_megatron_optimizer`` is deliberately not patched. Delete
this module when OptimizerConfig accepts dtype names, and the DDP reads ``main_grads_dtype``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from precision_shim import errors
from precision_shim.adapting import Call, Findings, current_settings, in_force, seam, warn
from precision_shim.precision.dtypes import name_of, read_dtype
from precision_shim.precision.model import TrainableDtypes, trainable_dtypes

from ..buffers import grad_buffers
from ..checkpoints.optimizer_state import note_precision_aware
from ..installed import FUSED_ADAM_ARGUMENTS, fused_adam_support, needs_gather
from ..policy.legality import GATHERS, cannot_train, check_dtypes, need_precision_aware
from ..policy.optimizer_plan import OptimizerPlan, coerce_written
from ..policy.requested import ALIGNMENT, COERCION, DISPATCH, GROUP, MOSTLY, SCALING
from ..policy.scaler import NOT_SCALED, unscaled, with_scaler
from .build import Build, current_build, megatron_label
from .config_dtypes import coerce_fields
from .ddp import compared_with

CONFIG = "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__"

_told: MutableMapping[Any, frozenset[str]] = WeakIdKeyDictionary()
"""Maps an OptimizerConfig to the codes of the problems of which ``check`` has warned the user."""


def find_noted_codes(config: Any) -> frozenset[str]:
    """The codes of an OptimizerConfig's problems that the audit omits, because ``check`` warned."""
    return frozenset() if config is None else _told.get(config, frozenset())


def _note_told(config: Any, *codes: str) -> None:
    _told[config] = find_noted_codes(config).union(codes)


# Order matters: of two wrappers of one symbol, the wrapper defined first is the inner wrapper.
@seam(
    CONFIG,
    DISPATCH,
    why="a precision-aware optimizer without TransformerEngine ends in a bare TypeError",
    delete_when="Megatron says what is missing",
    relies_on=(
        "use_precision_aware_optimizer",
        "use_distributed_optimizer",
        "optimizer",
        "optimizer_cpu_offload",
    ),
    **MOSTLY,
)
def refuse_what_cannot_run(call: Call) -> Any:
    """Raise an error with the reason if the installed FusedAdam cannot be precision-aware."""
    config = call.instance
    if (
        config.use_precision_aware_optimizer
        and config.optimizer == "adam"  # for other optimizers Megatron itself raises a clear error
        and config.use_distributed_optimizer
        and not config.optimizer_cpu_offload
    ):
        problem = fused_adam_support().problem
        if problem:
            raise errors.UnsupportedPrecisionError(
                f"{megatron_label()}: use_precision_aware_optimizer=True cannot run: {problem}. "
                "It needs a TransformerEngine whose FusedAdam has the arguments "
                f"{', '.join(FUSED_ADAM_ARGUMENTS)} (2.3 or newer for bf16 moments). Install "
                "one, or set use_precision_aware_optimizer to False."
            )
    return call.proceed()


@seam(
    CONFIG,
    "dtype-coercion",
    why="every path into OptimizerConfig runs it, subclasses and deferred checks included",
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1805",
    delete_when="Megatron's OptimizerConfig takes dtype names",
    relies_on=("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "main_grads_dtype"),
    **MOSTLY,
)
def coerce_config(call: Call) -> Any:
    """Turn dtype names in an OptimizerConfig into dtypes, and raise an error for illegal dtypes."""
    where = megatron_label()
    check_dtypes(coerce_fields(call.instance, but=()), fused_adam_support(), where=where)
    _refuse(
        need_precision_aware(vars(call.instance)), f"{where}, OptimizerConfig", errors.DtypeError
    )
    return call.proceed()


def _refuse(found: Findings, where: str, error: type[errors.PrecisionShimError]) -> None:
    """Raise an error with the first problem that a rule found, whose key is a field."""
    for problem in found.problems:
        raise error(f"{where}: {problem.key}: {problem}")


def apply_plan(build: Build, *, native: bool = False) -> OptimizerPlan:
    """Choose the OptimizerConfig's fields for a model whose DDP is built, and report the decision.

    An adapter calls ``apply_plan`` in a seam, with the features ``APPLYING``, at the framework's
    function that makes the config. ``native``: whether the framework sets the dtypes by the
    model's.

    Raises:
        DtypeError: the user wrote an unknown dtype name, an illegal dtype, or a dtype that is legal
            only with the precision-aware optimizer.
        SettingsError: the initial loss scale is below the minimum, or a value is no number.
    """
    requested, now = build.requested, build.in_force()
    where = requested.where
    if now.dispatches and not native:
        plan = build.plan(now)
        build.decide(DISPATCH, plan.chosen, plan.because)
        for text in plan.warnings:
            warn(f"{build.framework} {requested.subject}: {text}")
    else:
        plan = OptimizerPlan(coerce_written(requested.asked, where, now))
    plan = with_scaler(plan, requested, now, current_settings(), build.dtype)
    coerces = in_force(build.framework, COERCION, GROUP)
    if coerces and not requested.precision_aware_by_itself:
        _refuse(
            need_precision_aware(plan.fields), f"{where}, {megatron_label()}", errors.DtypeError
        )
    return plan


def keep_layout(plan: OptimizerPlan, config: Any) -> None:
    """Record whether user or shim made ``config``, which the optimizer gets, precision-aware."""
    if plan.by_user is not None:
        note_precision_aware(config, by_user=plan.by_user)


def with_fields(config: Any, fields: Mapping[str, Any]) -> Any:
    """Copy an OptimizerConfig with other field values, and validate the copy.

    Returns the same object if no value differs. Adapters call ``with_fields`` if the
    framework makes the config before the model.
    """
    others = {key: new for key, new in fields.items() if getattr(config, key, new) != new}
    if not others:
        return config
    config = copy.copy(config)
    for key, value in others.items():
        setattr(config, key, value)
    check_again(config)
    return config


def check_again(config: Any) -> None:
    """Validate an OptimizerConfig on which a framework has set fields, and derive fields again."""
    # Megatron-Bridge 0.5 and later validates and computes derived fields in ``finalize``.
    (getattr(config, "finalize", None) or config.__post_init__)()


def apply_to_config(
    call: Call, framework: str, config: Any, model: Any, *, stale: bool = False
) -> Any:
    """Copy the framework's OptimizerConfig, apply the plan to it, and make the optimizer.

    Outside the context manager ``building``, it only makes the optimizer.

    Args:
        call: the call of the function that makes the optimizer, which has a parameter ``config``.
        framework: the framework's name.
        config: the framework's OptimizerConfig, which is copied and not changed.
        model: the model's DDPs, which are compared with the config.
        stale: whether fields were set after the validation. Outdated derived fields would make
            Megatron keep whole fp32 master weights, so the shim recomputes them. Checkpoints are
            written in the layout that a job without the shim reads.
    """
    build = current_build(framework)
    if build is None:
        return call.proceed()
    plan = apply_plan(build)
    made = with_fields(config, plan.fields)
    if stale:
        keeps = bool(getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))
        plan = dataclasses.replace(plan, by_user=plan.by_user and keeps)
        if made is config:
            made = copy.copy(config)
            check_again(made)
    keep_layout(plan, made)
    check(framework, made, model)
    call.arguments["config"] = made
    return call.proceed()


def check(framework: str, config: Any, model: Any) -> None:
    """Compare an OptimizerConfig with the live parameters and buckets; warn if they disagree.

    An adapter calls ``check`` in its seam at the function that makes the optimizer from ``model``,
    a DDP or a list of them; one of this seam's features must be ``grad-bucket-alignment``.

    Raises:
        InconsistentPrecisionError: fp16 gradients would be clipped, which Megatron cannot do. In
            strict mode, ``check`` also refuses an fp16 model without loss scaling, and different
            dtypes of model and config, except for a bucket dtype that the user wrote.
    """
    build = current_build(framework)
    if build is not None and in_force(framework, SCALING, GROUP):
        _refuse_unscaled(build, config)
    chunks = _wrapped_chunks(model)
    buckets = {buffer.grad_data.dtype for buffer in grad_buffers(chunks)}
    live = trainable_dtypes(chain.from_iterable(chunk.parameters() for chunk in chunks))
    gathers = [getattr(chunk.ddp_config, name, False) for chunk in chunks for name in GATHERS]
    found = cannot_train(
        vars(config),
        live,
        buckets,
        distributed=config.use_distributed_optimizer,
        written_back=any(gathers) or not (live.quantized and needs_gather()),
    )
    where = framework if build is None else build.requested.where
    _refuse(found, f"{where}, {megatron_label()}", errors.InconsistentPrecisionError)
    if not in_force(framework, ALIGNMENT, GROUP):
        return
    told = [compared_with.get(chunk) for chunk in chunks]
    problems = _compare(build, config, live, buckets, told)
    message = (
        f"{framework}, {megatron_label()}: {'; '.join(problems)}. Let fp16, bf16 and "
        "main_grads_dtype of the optimizer's config fit the model and its DDP's "
        "grad_reduce_in_fp32, or leave them to the shim."
    )
    if problems and current_settings().strict and not any(told):
        raise errors.InconsistentPrecisionError(message)
    if problems:
        warn(message)


def _refuse_unscaled(build: Build, config: Any) -> None:
    if build.dtype is not torch.float16 or config.fp16 or getattr(config, "loss_scale", None):
        return
    message = unscaled(build.requested.where, config.fp16, config.bf16)
    if current_settings().strict:
        raise errors.InconsistentPrecisionError(message)
    _note_told(config, "scaler-missing", "params-dtype")
    build.decide(SCALING, *NOT_SCALED)
    warn(message)


def _compare(
    build: Build | None,
    config: Any,
    live: TrainableDtypes,
    buckets: set[torch.dtype],
    told: list[torch.dtype | None],
) -> list[str]:
    """How config and model differ; ``told``: of each chunk, see ``compared_with``."""
    # Without dtype-coercion the config may contain dtype names.
    main_grads, params = map(read_dtype, (config.main_grads_dtype, config.params_dtype))
    if not config.use_precision_aware_optimizer:
        main_grads = torch.float32
    problems = []
    if buckets and buckets != {main_grads}:
        _note_told(config, "main-grads-dtype")
        # ``build_ddp`` has already compared and reported a bucket dtype that the user wrote.
        if set(told) != {main_grads}:
            problems.append(
                f"the optimizer expects {name_of(main_grads)} main grads, the gradient bucket is "
                f"{', '.join(sorted(map(name_of, buckets)))}"
            )
    requested = () if build is None else (*build.requested.unchecked, *build.requested.asked)
    # The audit says of a ``params_dtype`` that the user wrote that it has no effect.
    if live.single is not None and live.single is not params and "params_dtype" not in requested:
        _note_told(config, "params-dtype")
        problems.append(
            f"the OptimizerConfig is for {name_of(params)} parameters, the trainable "
            f"parameters are {name_of(live.single)}"
        )
    return problems


def _wrapped_chunks(model: Any) -> list[Any]:
    chunks = model if isinstance(model, list) else [model]
    return [chunk for chunk in chunks if hasattr(chunk, "buffers") and hasattr(chunk, "ddp_config")]
