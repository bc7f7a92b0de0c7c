"""Plan AReaL's jobs on Megatron from their launch line, with AReaL's own config loader."""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from precision_shim.adapting import versioned
from precision_shim.errors import DtypeError, PlanError
from precision_shim.planning.calling import call_quietly
from precision_shim.planning.command import Job, syntax_of
from precision_shim.planning.record import Problem
from precision_shim.planning.request import Request
from precision_shim.planning.shapes import Model
from precision_shim.planning.values import no_adapters

from . import areal_sides, areal_stages
from .areal import KEYS, STATES, read
from .megatron import PRECISION_AWARE
from .megatron.deciding.numbers import STYLES
from .megatron.planning.plan import MegatronModel
from .megatron.planning.sizes import Sizes
from .rollout import FEATURE, model_type, problems_of, problems_of_heads

_ROLES = ("actor", "critic", "ref")
_STYLES = tuple(style for style in STYLES if style != "WSD")  # AReaL passes no wsd_decay_steps


def plan_job(job: Job) -> Request:
    """Read a launch line of an AReaL job.

    Raises:
        PlanError: the config or a model cannot be read, or a model has LoRA or is not on Megatron.
    """
    written, merged, config = load(job)
    models = tuple(_models(job, config))
    problems, notes = _both_sides(job, written, merged)
    aware = any(
        model.wishes.precision_aware_by_itself and model.dtype is torch.bfloat16 for model in models
    )
    if aware:
        notes.append(
            f"without the shim AReaL keeps whole fp32 master weights, also where {PRECISION_AWARE} "
            "is on: 2 bytes per parameter more than such a model is counted here"
        )
    version = versioned("areal").partition(" ")[2] or None
    world = models[0].sizes.world
    return Request(
        "areal",
        version,
        world,
        models,
        megatron=True,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _both_sides(job: Job, written: Any, merged: Any) -> tuple[list[Problem], list[str]]:
    """Predict the report of the job's driver on the dtypes of trainer and rollout."""
    try:
        both = areal_sides.engines(merged)
    except DtypeError as error:
        return [Problem.of(error, "rollout", error.key)], []
    if both is None:
        return [], []
    on = job.in_force(FEATURE, areal_sides.GROUP)
    kind, where = model_type(str(merged.actor.path)), versioned("areal")
    problems, notes = problems_of_heads(where, areal_sides.heads, job.settings, on=on)
    found, told = problems_of(where, *both, job.settings, on=on, model_type=kind)
    return [*found, *problems], [*told, *notes]


def load(job: Job) -> tuple[Any, Any, Any]:
    """Load a job's config as the class that the job's script passes to ``load_expr_config``.

    Returns:
        The user's values as OmegaConf's config; these values with AReaL's defaults; AReaL's object.

    Raises:
        PlanError: the config cannot be loaded, or the script is not on this machine.
    """
    try:
        from areal.api import cli_args
        from omegaconf import OmegaConf
    except ImportError as error:
        raise PlanError(
            f"{versioned('areal')}: its config cannot be imported ({error}). Install AReaL here."
        ) from error
    name = _class_of(job)
    if not hasattr(cli_args, name):
        raise PlanError(
            f"{versioned('areal')}, {job.target}: it has no load_expr_config(args, CLASS) with a "
            "class of AReaL's, which says what its config is. Plan the job from a script that has."
        )

    def parse() -> tuple[Any, Any, Any]:
        written, _ = cli_args.parse_cli_args(list(job.arguments))
        merged = cli_args.to_structured_cfg(written, config_cls=getattr(cli_args, name))
        return written, merged, OmegaConf.to_object(merged)

    def refuse(why: str) -> PlanError:
        return PlanError(f"{versioned('areal')}, {job.target}: {why}. Correct the command line.")

    return call_quietly(parse, refuse)


def _class_of(job: Job) -> str:
    for node in syntax_of(job.source):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("load_expr_config"):
            return ast.unparse(node.args[-1]).rpartition(".")[2]
    return ""


def _models(job: Job, config: Any) -> Iterator[MegatronModel]:
    from areal.api.alloc_mode import ModelAllocation

    for role in _ROLES:
        section = getattr(config, role, None)
        if section is None:
            continue
        try:
            allocation = ModelAllocation.from_str(section.backend, name=role)
        except Exception as error:  # AReaL's parser raises various errors
            raise PlanError(
                f"{versioned('areal')}, {role}.backend={section.backend!r}: AReaL cannot read it. "
                "Write a backend and its sizes, such as megatron:d4t2."
            ) from error
        if allocation.backend != "megatron":
            raise PlanError(
                f"{versioned('areal')}, {role}.backend={section.backend!r}: planned are models on "
                "Megatron. Write megatron:..., or plan the job without this model."
            )
        if section.use_lora:
            raise no_adapters(
                f"{versioned('areal')}, {role}.use_lora=True", f"{role}.use_lora=false"
            )
        model = job.model(section.path)
        sizes, uncounted = _sizes(section, role, allocation.parallel), tuple[str, ...]()
        if section.megatron.bridge_type == "mbridge":  # megatron-bridge splits evenly
            sizes, uncounted = areal_stages.split(model, sizes)
        strategy = section.scheduling_strategy
        yield MegatronModel(
            replace(read(_as_engine(section)), subject=role),
            model,
            sizes,
            _as_engine(section).dtype,
            bucket_in_fp32=section.megatron.ddp.grad_reduce_in_fp32,
            value_head=role == "critic",
            key=f"{role}.megatron.{{}}",
            bucket_key=f"{role}.megatron.ddp.grad_reduce_in_fp32",
            place=str(getattr(strategy, "target", None) or role),
            takes_name=lambda name: isinstance(getattr(torch, name, None), torch.dtype),
            keys={name: f"{role}.optimizer.{key}" for name, key in KEYS.items()},
            known=vars(section.megatron),
            prefix="++",
            illegal=(*_illegal(section, role, sizes), *_wrong_fp8(section, role, model)),
            notes=(*uncounted, *_fp8(section, role)),
        )


def _sizes(section: Any, role: str, parallel: Any) -> Sizes:
    key = f"{role}.megatron.virtual_pipeline_parallel_size"
    return Sizes(
        parallel.world_size,
        tensor=parallel.tp_size,
        pipeline=parallel.pp_size,
        context=parallel.cp_size,
        expert=parallel.ep_size,
        expert_tensor=parallel.etp_size,
        virtual=max(section.megatron.virtual_pipeline_parallel_size, 1),
        sequence_parallel=parallel.tp_size > 1,
        keys={**dict.fromkeys(vars(Sizes(1)), f"{role}.backend"), "virtual": key},
    )


def _wrong_fp8(section: Any, role: str, model: Model) -> Iterator[Problem]:
    """Yield a problem if a job trains in fp8 from weights that are not fp8."""
    if section.megatron.fp8_config is None or not model.config:
        return
    found = model.config.get("quantization_config")
    if not isinstance(found, Mapping) or found.get("quant_method") != "fp8":
        key, fault = f"{role}.megatron.fp8_config", f"the weights have quantization_config={found}"
        remedy = "Leave it out, or name a model with quant_method fp8."
        yield Problem("dtype", role, key, f"AReaL needs fp8 weights for it; {fault}", remedy)


def _fp8(section: Any, role: str) -> Iterator[str]:
    if section.megatron.fp8_config is not None:
        key = f"{role}.megatron.fp8_config"
        yield f"{key}: not planned: fp8 weights are counted as {section.dtype} weights"


def _illegal(section: Any, role: str, sizes: Sizes) -> Iterator[Problem]:
    """Yield a problem for each value with which AReaL's engine makes no optimizer or scheduler."""
    if (sizes.virtual or 1) > 1 and sizes.pipeline == 1:
        fault = f"{sizes.virtual}: AReaL needs more than one pipeline stage for it"
        yield Problem("layers", role, sizes.key("virtual"), fault, "Leave it out.")
    ours, where = section.optimizer, f"{role}.optimizer"
    if ours is None:
        return
    if not section.megatron.ddp.use_distributed_optimizer:
        key = f"{role}.megatron.ddp.use_distributed_optimizer"
        fault = "AReaL's checkpoints need the distributed optimizer"
        yield Problem("flags", role, key, fault, "Write true, or leave it out.")
    if not 0 <= ours.lr < math.inf:
        fault = f"Megatron's scheduler refuses {ours.lr}"
        yield Problem("number", role, f"{where}.lr", fault, "Write a number from 0.")
    if ours.lr_scheduler_type not in _STYLES:
        fault = f"AReaL cannot use {ours.lr_scheduler_type!r}; allowed: {', '.join(_STYLES)}"
        yield Problem("number", role, f"{where}.lr_scheduler_type", fault, "Write one of them.")


def _as_engine(section: Any) -> Any:
    """Imitate AReaL's engine for ``read``: replace ``adam_bf16`` by ``adam`` with bf16 states."""
    ours, theirs = copy.copy(section.optimizer), copy.copy(section.megatron)
    dtype = getattr(torch, section.dtype)
    if ours is not None and ours.type == "adam_bf16":
        ours.type, dtype = "adam", torch.bfloat16
        setattr(theirs, PRECISION_AWARE, True)
        for name in STATES[2:]:
            setattr(theirs, name, "bfloat16")
    return SimpleNamespace(config=section, optimizer_config=ours, mcore_config=theirs, dtype=dtype)
