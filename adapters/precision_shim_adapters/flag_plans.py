"""Plan slime's and miles' jobs from their launch lines, with the trainers' own parsers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from precision_shim.adapting import versioned
from precision_shim.errors import PlanError
from precision_shim.planning.command import Job
from precision_shim.planning.record import Problem
from precision_shim.planning.request import Request
from precision_shim.planning.shapes import Model
from precision_shim.planning.values import no_adapters

from . import miles, slime
from .flag_parsers import Parsed, parse
from .megatron import RequestedConfig
from .megatron.planning.plan import MegatronModel
from .megatron.planning.sizes import read_sizes

_READ: dict[str, Callable[[Any, str], RequestedConfig]] = {"slime": slime.read, "miles": miles.read}
"""The functions that read the flags, in the worker as well."""

_LESS = (
    *("only_train_params_name_list", "freeze_params_name_list", "use_stateless_adam"),
    *("stream_optimizer_state_to_disk", "debug_disable_optimizer"),
    *("fp8_param_gather", "fp4_param_gather"),
)
"""Flags with which a GPU keeps fewer or smaller tensors than the plan counts."""

_REFUSED = {
    "use_megatron_fsdp": (False, None),
    "use_torch_fsdp2": (False, None),
    "num_distributed_optimizer_instances": (1, None),
}
"""Flags that the plan supports only with one of these values."""


def plan_job(job: Job) -> Request:
    """Read a launch line of slime's or miles' ``train.py``.

    Raises:
        PlanError: a parser refuses the line, the model cannot be read, or the plan does not support
            a flag.
    """
    found = parse(job)
    args, where = found.args, versioned(job.framework)
    if getattr(args, "lora_rank", 0) or getattr(args, "lora_adapter_path", None):
        raise no_adapters(f"{where}, --lora-rank", "--lora-rank 0")
    for name, planned in _REFUSED.items():
        if (value := getattr(args, name, None)) not in planned:
            raise PlanError(
                f"{where}, {found.flag(name)}={value}: not planned, because it shards the states "
                "in another way. Leave it out."
            )
    notes = [*found.notes]
    if found.roles:
        notes.append(
            "not counted: what a model keeps in the host's memory while other models use the GPUs"
        )
    else:
        notes.append("--debug-rollout-only: the job makes no model that is trained")
    if found.roles and (args.kl_coef != 0 or args.use_kl_loss):
        notes.append("not counted: the reference model, whose weights are in the host's memory")
    less = [found.flag(name) for name in _LESS if getattr(args, name, None)]
    if less:
        notes.append(f"counted as without {', '.join(less)}, so the bytes are an upper bound")
    if found.unknown:
        notes.append(f"no parser of {where} reads {', '.join(found.unknown)}: it has no effect")
    return Request(
        job.framework,
        where.partition(" ")[2] or None,
        args.world_size,
        tuple(_model(job, found, role) for role in found.roles),
        megatron=True,
        notes=tuple(notes),
    )


def _model(job: Job, found: Parsed, role: str) -> MegatronModel:
    args = found.roles[role]
    sizes = read_sizes(
        args.world_size,
        "--actor-num-gpus-per-node",
        "--",
        vars(args),
        sequence_parallel=bool(args.sequence_parallel),
    )
    keys = {name: found.flag(key.removeprefix("--")) for name, key in sizes.keys.items()}
    keys["virtual"] = found.flag("num_virtual_stages_per_pipeline_rank")
    if args.num_layers_per_virtual_pipeline_stage:
        keys["virtual"] = found.flag("num_layers_per_virtual_pipeline_stage")
    dtype = args.params_dtype
    if args.fp16 or args.bf16:  # Megatron's Float16Module reads these two
        dtype = torch.float16 if args.fp16 else torch.bfloat16
    model = job.model(args.hf_checkpoint)
    return MegatronModel(
        _READ[job.framework](args, role),
        model,
        replace(sizes, pads_vocabulary=True, keys={**keys, "world": sizes.keys["world"]}),
        dtype,
        bucket_in_fp32=bool(args.accumulate_allreduce_grads_in_fp32),
        value_head=role == "critic",
        keys=found.flags,
        bucket_key="--accumulate-allreduce-grads-in-fp32",
        place="actor",
        illegal=tuple(_illegal(found, args, role)),
        notes=tuple(_another_model(found, args, model)),
        known=found.flags.keys(),
        write=lambda fields: _written(job, found, role, fields),
        one_line=True,
    )


def _illegal(found: Parsed, args: Namespace, role: str) -> Iterator[Problem]:
    """Yield the faults at which the trainer ends when it builds a model."""
    if fault := found.schedule[role]:
        yield Problem(
            "number",
            role,
            "--lr",
            f"Megatron cannot make the schedule of learning rate and weight decay: {fault}",
            "Correct --lr, --min-lr, --weight-decay, or the flags that begin with --lr- .",
        )
    if not args.load and not args.pretrained_checkpoint:
        yield Problem(
            "missing",
            role,
            "--ref-load",
            "no directory with weights: expected --load, --ref-load or --pretrained-checkpoint",
            "Write one of them.",
        )
    if args.fp16 and args.bf16:
        yield Problem(
            "flags",
            role,
            "fp16",
            "fp16 and bf16 are both true, and Megatron takes one of them",
            "Write bf16: false in the same place, or --fp16 on the command line.",
        )
    if not isinstance(args.params_dtype, torch.dtype):
        yield Problem(
            "dtype",
            role,
            "params_dtype",
            f"Megatron's layers take no name of a dtype, such as {args.params_dtype!r}",
            "Leave it out, and write --fp16 on the command line for an fp16 model.",
        )
    if args.moe_use_upcycling:
        yield Problem("flags", role, "--moe-use-upcycling", "it ends the job", "Leave it out.")
    if getattr(args, "use_stateless_adam", False) and not args.no_save_optim:
        yield Problem(
            "flags",
            role,
            "--use-stateless-adam",
            "it has no moments to save, and --no-save-optim is missing",
            "Add --no-save-optim.",
        )


def _another_model(found: Parsed, args: Namespace, model: Model) -> Iterator[str]:
    """Yield a note for each size of ``config.json`` that the trainer's flags contradict.

    The trainers build the model from the flags, and compare only some flags with ``config.json``.
    """
    heads = model.number("num_attention_heads")
    if not heads:
        return
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    for name, counted, built in (
        ("num_query_groups", model.number("num_key_value_heads") or heads, groups),
        ("num_experts", model.experts, args.num_experts or 0),
        ("kv_channels", model.number("head_dim"), args.kv_channels),
        ("mtp_num_layers", model.number("num_nextn_predict_layers"), args.mtp_num_layers or 0),
    ):
        if counted != built and (counted or name != "kv_channels"):
            yield (
                f"counted is the model of config.json, and the flags build another one: "
                f"{found.flag(name)} {built}, in config.json {counted}"
            )


def _written(
    job: Job, found: Parsed, role: str, fields: Mapping[str, Any]
) -> tuple[tuple[str, ...], MegatronModel] | None:
    """Write fields as flags and parse the longer line; ``None`` if the trainer refuses it."""
    lines = [
        found.flag(name) if name in found.switches else f"{found.flag(name)} {value}"
        for name, value in fields.items()
        if name in found.flags
    ]
    words = [word for line in lines for word in line.split()]
    longer = replace(job, arguments=(*job.arguments, *words))
    try:
        return tuple(lines), _model(longer, parse(longer), role)
    except PlanError:
        return None
