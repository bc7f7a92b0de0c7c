"""The seams at Megatron's DDP read the parameters' dtypes and set the bucket's dtype.

Every path to a gradient bucket (a framework's ``get_model``, mbridge, Megatron-Bridge) calls
``DistributedDataParallel.__init__`` with the parameters whose gradients the bucket will contain.
The seams do not change a DDP that is built outside a supported framework.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import Any

import torch
import torch.distributed

from precision_shim.adapting import Call, check_ranks, in_force, seam, warn
from precision_shim.precision.dtypes import name_of
from precision_shim.precision.model import TrainableDtypes, trainable_dtypes

from ..checkpoints.optimizer_state import bucket_without_shim
from ..installed import FSDP_CLASSES, FSDP_GRADS, fsdp_heeds_bucket
from ..policy.bucket import SUMS, choose_bucket, describe_bucket, fsdp_in_fp32
from ..policy.requested import ALIGNMENT, DISPATCH, FSDP_GROUP, MOSTLY, SCALING, InForce
from .build import Build, build_around

DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__"

UNCHECKED = (
    "check_for_nan_in_grad=False",
    "it would end the job at an fp16 overflow, which the dynamic loss scaler skips",
)
"""The decision to turn the check off, and its reason."""

compared_with: weakref.WeakKeyDictionary[Any, torch.dtype] = weakref.WeakKeyDictionary()
"""Maps a DDP whose bucket dtype the user set to the main grads' dtype that was compared."""


@seam(
    DDP,
    ALIGNMENT,
    why="every path to a gradient bucket passes here, with the live parameters at hand",
    upstream="https://github.com/verl-project/verl/pull/6526",
    delete_when="the bucket follows the main grads on every path upstream",
    relies_on=("grad_reduce_in_fp32",),
    **MOSTLY,
)
@seam(
    DDP,
    (DISPATCH, SCALING),
    why="the first place that sees the parameters an optimizer will train; and the DDP reads "
    "check_for_nan_in_grad from this config at each reduction",
    delete_when="frameworks hand the model to the function that makes the OptimizerConfig, and "
    "Megatron's check asks whether the loss scale is dynamic",
    **MOSTLY,
)
def build_ddp(
    call: Call,
    ddp_config: Any,
    module: Any,
    full_param_layout: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Record the dtypes of a chunk's trainable parameters, and pass its DDP a matching config."""
    build = build_around(ddp_config)
    if build is None:
        return call.proceed()
    model = _over_stages(trainable_dtypes(module.parameters()), pg_collection)
    build.seen = build.seen + model
    build.distributed = bool(ddp_config.use_distributed_optimizer)
    # Change a copy: other chunks share the caller's config.
    changed = copy.copy(ddp_config)
    now = build.in_force()
    if now.scales:
        _let_overflows_pass(build, changed, model, now)
    compared = _align(build, changed, model, now)
    if changed != ddp_config:
        call.arguments["ddp_config"] = changed
    realigned = changed.grad_reduce_in_fp32 != ddp_config.grad_reduce_in_fp32
    # In Megatron 0.18 and later the caller may pass a parameter layout for the caller's bucket
    # dtype. Without a passed layout the DDP computes its own layout.
    if realigned and full_param_layout is not None:
        call.arguments["full_param_layout"] = None
    result = call.proceed()
    if realigned:
        bucket_without_shim[call.instance] = bool(ddp_config.grad_reduce_in_fp32)
    if compared is not None:
        compared_with[call.instance] = compared
    return result


def _align(build: Build, config: Any, model: TrainableDtypes, now: InForce) -> torch.dtype | None:
    """Set the bucket's dtype; return the main grads' dtype if the user's bucket dtype stays."""
    if not now.aligns:
        return None
    plan, requested = build.plan(now, model), build.requested
    present = bool(config.grad_reduce_in_fp32)
    written = requested.bucket_in_fp32 is not None or bool(getattr(config, SUMS, None))
    choice = choose_bucket(
        present=present,
        user_set=written,
        align=now.over_user,
        main_grads=plan.main_grads,
        model=model,
    )
    if build.in_fp32 not in (None, choice.grad_reduce_in_fp32):
        because = f"as the model's first chunk; here {choice.because}"
        choice = dataclasses.replace(choice, grad_reduce_in_fp32=build.in_fp32, because=because)
    build.in_fp32 = choice.grad_reduce_in_fp32
    changed = build.in_fp32 != present
    because, problem = choice.because, choice.problem
    if changed and getattr(config, "use_layer_wise_param_layout", False):
        problem = "the layer-wise optimizer's parameter layout is computed for the bucket as it is"
        because = "left as it is"
    elif changed:
        config.grad_reduce_in_fp32 = build.in_fp32
        if build.in_fp32 and getattr(config, SUMS, None):  # ``GRAD_BUCKET=align``
            setattr(config, SUMS, ())
    in_fp32 = bool(config.grad_reduce_in_fp32)
    build.decide(ALIGNMENT, describe_bucket(in_fp32, model), because)
    if problem and requested.trains:  # without an optimizer the bucket stays empty
        warn(f"{build.framework} {requested.subject}: {problem}.")
    return plan.main_grads if written and not now.over_user else None


@seam(
    feature=(ALIGNMENT, SCALING),
    at=FSDP_CLASSES,
    group=FSDP_GROUP,
    why="the same for Megatron-FSDP, which has classes of its own",
    delete_when="Megatron's check asks whether the loss scale is dynamic, and the bucket follows "
    "the main grads",
    optional=True,
)
def build_fsdp(call: Call, ddp_config: Any, module: Any, pg_collection: Any = None) -> Any:
    """Pass Megatron-FSDP a config with a matching bucket, without the NaN check of gradients."""
    build = build_around(ddp_config)
    if build is None:
        return call.proceed()
    model = _over_stages(trainable_dtypes(module.parameters()), pg_collection)
    changed = copy.copy(ddp_config)
    now = build.in_force()
    if in_force(build.framework, SCALING, FSDP_GROUP):
        _let_overflows_pass(build, changed, model, now)
    compared = _align_fsdp(build, changed, model, now)
    if changed != ddp_config:
        call.arguments["ddp_config"] = changed
    result = call.proceed()
    if compared is not None:
        compared_with[call.instance] = compared
    return result


def _align_fsdp(
    build: Build, config: Any, model: TrainableDtypes, now: InForce
) -> torch.dtype | None:
    """Like ``_align``; a ``megatron_fsdp_main_grads_dtype`` in the config is the user's."""
    own, present = getattr(config, FSDP_GRADS, None), config.grad_reduce_in_fp32
    if not in_force(build.framework, ALIGNMENT, FSDP_GROUP):
        return None
    if own is not None:
        in_fp32 = fsdp_in_fp32(bool(present), own, heeded=fsdp_heeds_bucket())
        chosen = f"gradient bucket {'fp32' if in_fp32 else name_of(own)} ({FSDP_GRADS}={own})"
        build.decide(ALIGNMENT, chosen, "set by the user")
        return build.plan(now, model).main_grads
    compared = _align(build, config, model, now)
    if config.grad_reduce_in_fp32 and hasattr(config, FSDP_GRADS):
        # Up to 0.18 grad_reduce_in_fp32=True also overrides the user's dtype of the communication.
        setattr(config, FSDP_GRADS, torch.float32)
        config.grad_reduce_in_fp32 = present
    return compared


def _let_overflows_pass(build: Build, config: Any, model: TrainableDtypes, now: InForce) -> None:
    """Turn ``check_for_nan_in_grad`` off if the loss scaler will skip steps with an overflow."""
    requested = build.requested
    checks = bool(getattr(config, "check_for_nan_in_grad", False))
    # Megatron makes a dynamic scaler for ``fp16`` without a ``loss_scale``.
    fp16 = requested.native.get(torch.float16, {}).get("fp16", False) or now.dispatches
    dynamic = requested.asked.get("fp16", fp16) and not requested.asked.get("loss_scale")
    if not (checks and torch.float16 in model.counts and dynamic):
        return
    if requested.nan_check_written:
        warn(
            f"{build.framework} {requested.subject}: check_for_nan_in_grad=True is the user's: an "
            "fp16 overflow ends the job before the loss scaler can skip the step. Leave it out, "
            "or set it to False."
        )
        return
    config.check_for_nan_in_grad = False
    build.decide(SCALING, *UNCHECKED)


def _over_stages(model: TrainableDtypes, pg_collection: Any = None) -> TrainableDtypes:
    """Merge the trainable dtypes of a model chunk with those of the same chunk on other stages.

    The first and the last stage each have a copy of tied embeddings, and add up the copies'
    gradients, which cannot be added if one bucket is fp32 and the other bf16.

    Every rank of the pipeline-parallel group has to call this function for each chunk; all stages
    build equally many chunks. ``pg_collection`` is ``None`` for Megatron's global groups.
    """
    if not torch.distributed.is_initialized():
        return model
    check_ranks()  # before the buckets and the fp16 overflows of the ranks go different ways
    group = getattr(pg_collection, "pp", None)
    if group is None:
        from megatron.core import parallel_state

        group = parallel_state.get_pipeline_model_parallel_group(check_initialized=False)
    if group is None or torch.distributed.get_world_size(group) < 2:
        return model
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, model, group=group)
    return sum(every, TrainableDtypes())
