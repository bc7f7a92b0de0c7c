"""Read a trainer's settings from one flat argparse namespace with Megatron's flags.

A trainer with Megatron's flags makes its ``OptimizerConfig`` inline, each field from the flag of
the same name. While the trainer builds a model, the adapter changes the config's arguments.

Delete this module when trainers pass to OptimizerConfig only the flags that the user wrote.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from precision_shim.adapting import Call, collect, seam
from precision_shim.precision.dtypes import read_dtype
from precision_shim.seams import Seam

from ..policy.requested import ALIGNMENT, APPLYING, BUILDING, RequestedConfig
from .build import building, current_build
from .optimizer import apply_plan, check, keep_layout

CONFIG_INIT = "megatron.core.optimizer.optimizer_config:OptimizerConfig.__init__"
"""The function that an adapter patches if its trainer has no function that makes the config."""

_OF_THE_MODEL = ("fp16", "bf16", "params_dtype")
"""Fields of OptimizerConfig that a trainer sets from the model's dtype."""


def requested_by_flags(
    args: Namespace, where: str, subject: str, blockers: tuple[str, ...] = ()
) -> RequestedConfig:
    """Read one model's settings from a flat namespace of flags, checked by ``validate_args``.

    A flag counts as the user's if it differs from the default of Megatron's OptimizerConfig; one
    that the user wrote with its default value does not. ``where``: framework, version and "flags".
    For ``blockers`` see ``RequestedConfig``.
    """
    from megatron.core.optimizer import OptimizerConfig

    asked: dict[str, Any] = {}
    for field in dataclasses.fields(OptimizerConfig):
        value = getattr(args, field.name, field.default)
        if field.name not in _OF_THE_MODEL and read_dtype(value) != field.default:
            asked[field.name] = value
    # The two flags for the bucket's dtype are switches: a user can only turn them on.
    bucket = True if args.accumulate_allreduce_grads_in_fp32 else None
    if bucket is None and getattr(args, "grad_reduce_in_bf16", False):
        bucket = False
    return RequestedConfig(
        where=where,
        subject=subject,
        asked=asked,
        declared=args.params_dtype,
        native={torch.float16: {"fp16": True}},
        blockers=blockers,
        optimizer=str(args.optimizer),
        distributed=bool(args.use_distributed_optimizer),
        bucket_in_fp32=bucket,
    )


def fill_inline(call: Call, framework: str) -> Any:
    """Apply the plan to an OptimizerConfig in a seam at ``CONFIG_INIT``, if within ``building``."""
    build = current_build(framework)
    if build is None:
        return call.proceed()
    plan = apply_plan(build)
    call.arguments.update(plan.fields)
    result = call.proceed()
    keep_layout(plan, call.instance)
    return result


def building_seams(
    framework: str, model: str, read: Callable[[Any, str], RequestedConfig], **here: Any
) -> tuple[Seam, ...]:
    """The seams on the functions that make a model's bucket, config and optimizer.

    Args:
        framework: the trainer's name.
        model: its module with ``setup_model_and_optimizer(args, role)``.
        read: reads the flags of a role's model.
        here: fields of each seam.
    """

    @seam(f"{model}:setup_model_and_optimizer", BUILDING, why="makes bucket and optimizer", **here)
    def build(call: Call, args: Any, role: str = "actor") -> Any:
        """Record that a model is being built, with a function that reads its settings."""
        with building(framework, lambda: read(args, role)):
            return call.proceed()

    @seam(CONFIG_INIT, APPLYING, why="the trainer makes its config inline", **here)
    def configure(call: Call) -> Any:
        """Write the fields that the shim chose into the trainer's OptimizerConfig."""
        return fill_inline(call, framework)

    make = "get_megatron_optimizer"
    at = {"target": f"megatron.core.optimizer:{make}", "aliases": (f"{model}:{make}",)}

    @seam(feature=ALIGNMENT, at=[at], why="gets config and buckets", **here)
    def check_optimizer(call: Call, config: Any, model_chunks: Any) -> Any:
        """Compare the config with the live model before the optimizer is made."""
        if current_build(framework) is not None:
            check(framework, config, model_chunks)
        return call.proceed()

    return collect(build, configure, check_optimizer)


def where_present(seams: Iterable[Seam], module: str) -> tuple[Seam, ...]:
    """Restrict the backend's seams to environments in which the trainer's module is installed.

    Use it, with a module that only the trainer has, if other projects have its package name, too.
    """
    return tuple(replace(seam, only_if=(*seam.only_if, module)) for seam in seams)
