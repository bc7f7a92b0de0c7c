"""Plan ms-swift's Megatron jobs from their launch lines, with ms-swift's own parser.

The plan does not run the arguments' ``__post_init__``, which needs GPUs and a model.
``_complete`` sets the dtypes as ms-swift's ``__post_init__`` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from precision_shim.adapting import versioned
from precision_shim.errors import PlanError
from precision_shim.planning.calling import call_quietly
from precision_shim.planning.command import Job
from precision_shim.planning.record import Problem
from precision_shim.planning.request import Request
from precision_shim.planning.shapes import Model
from precision_shim.planning.values import no_adapters, number
from precision_shim.precision.dtypes import parse_dtype

from .megatron.planning.plan import MegatronModel
from .megatron.planning.sizes import read_sizes
from .ms_swift import coerced, read

_CLASSES = {
    "pt": "MegatronPretrainArguments",
    "sft": "MegatronSftArguments",
    "rlhf": "MegatronRLHFArguments",
}
_GPUS = "NPROC_PER_NODE"
_FREEZES = ("freeze_parameters", "freeze_parameters_regex", "freeze_parameters_ratio")
_ADAPTERS = ("adapters", "ref_adapters", "mcore_adapter", "mcore_ref_adapter")


def plan_job(job: Job) -> Request:
    """Read a launch line that starts with ``megatron`` and ``pt``, ``sft`` or ``rlhf``.

    Raises:
        PlanError: ms-swift cannot parse the line, the model cannot be read, or the plan does not
            support an option.
    """
    args, kind = _parsed(job)
    where = _where()
    if args.tuner_type != "full":
        raise no_adapters(f"{where}, --tuner_type {args.tuner_type}", "--tuner_type full")
    for name in _ADAPTERS:  # with one of these flags ms-swift trains LoRA
        if getattr(args, name, None):
            raise no_adapters(f"{where}, --{name}", f"without --{name}")
    if args.use_megatron_fsdp:
        raise PlanError(
            f"{where}, --use_megatron_fsdp: it is not planned. Plan the job without it."
        )
    _check_dtypes(args)
    model = job.model(args.model)
    _complete(args, model)
    environ = {**os.environ, **job.environ}
    world = 1
    for name in (_GPUS, "NNODES"):
        world *= number(environ.get(name, 1), name, where)
    planned = MegatronModel(
        read(args, kind),
        model,
        read_sizes(world, _GPUS, "--", vars(args), sequence_parallel=bool(args.sequence_parallel)),
        args.torch_dtype,
        bucket_in_fp32=bool(args.accumulate_allreduce_grads_in_fp32),
        key="--{}",
        bucket_key="--accumulate_allreduce_grads_in_fp32",
        known=vars(args),
        illegal=tuple(_illegal(args)),
        notes=tuple(_unread(args)),
    )
    others = [name for name in ("ref_model", "teacher_model") if getattr(args, name, None)]
    notes = [f"not counted: the model of --{name}" for name in others]
    if job.arguments[0] == "rlhf" and args.rlhf_type in ("dpo", "kto", "grpo") and not others:
        notes.append("not counted: the reference model, whose parameters lie beside the model's")
    version = where.partition(" ")[2] or None
    return Request("ms-swift", version, world, (planned,), megatron=True, notes=tuple(notes))


def _illegal(args: Any) -> Iterator[Problem]:
    """Yield a problem for each value that ms-swift's ``__post_init__`` or trainer refuses."""
    kind = getattr(args, "rlhf_type", None)
    generates = kind == "grpo" or (kind == "gkd" and args.lmbda != 0)
    if generates and args.use_vllm and args.vllm_mode is None:
        fault = "ms-swift's trainer makes no rollout without it"
        yield Problem("flags", "model", "--vllm_mode", fault, "Write colocate or server.")
    if 0 < args.freeze_parameters_ratio < 1 and (args.pipeline_model_parallel_size or 1) > 1:
        key, fault = "--freeze_parameters_ratio", "ms-swift takes it on one pipeline stage only"
        yield Problem("flags", "model", key, fault, "Leave it out.")


def _unread(args: Any) -> Iterator[str]:
    """Yield a note for each option that changes bytes and that the plan does not read."""
    frozen = [name for name in _FREEZES if getattr(args, name)]
    if frozen:
        names = ", ".join(f"--{name}" for name in frozen)
        yield f"{names}: frozen parameters are counted as trained: the bytes are an upper bound"
    if args.megatron_extra_kwargs:
        yield (
            f"not planned: --megatron_extra_kwargs {args.megatron_extra_kwargs}: the bytes are "
            "those without"
        )
    if args.fp8_format is not None and args.fp8_param_gather:
        yield "not planned: --fp8_param_gather: fp8 weights are counted as 16-bit weights"


def _where() -> str:
    return versioned("ms-swift", "swift")


def _parsed(job: Job) -> tuple[Any, type]:
    words = list(job.arguments)
    if not words or words[0] not in _CLASSES:
        raise PlanError(
            f"{_where()}, {' '.join(words[:1]) or job.target}: planned are megatron "
            f"{', '.join(_CLASSES)}. Write one of them."
        )
    place = words.index("--config") + 1 if "--config" in words else 1
    if words[place:] and words[place].endswith((".yaml", ".yml", ".json")):
        raise PlanError(
            f"{_where()}, {words[place]}: arguments in a file are not planned. "
            "Write them in the line."
        )

    def parse() -> tuple[Any, list[str], type]:
        from swift.megatron import arguments
        from transformers import HfArgumentParser

        kind = getattr(arguments, _CLASSES[words[0]])
        return *HfArgumentParser(kind).parse_known_args(words[1:]), kind

    def refuse(why: str) -> PlanError:
        return PlanError(
            f"{_where()}, {job.target}: its arguments cannot be read: {why}. Run the plan in the "
            "environment of the job, and correct the line."
        )

    found, unknown, kind = call_quietly(parse, refuse)
    if unknown:
        raise PlanError(f"{_where()}: it does not know {', '.join(unknown)}. Correct the line.")
    return found, kind


def _check_dtypes(args: Any) -> None:
    """Check the model's dtype as ms-swift and Megatron do, because the parser does not check it.

    Raises:
        PlanError: ms-swift does not accept the dtype, or the line turns on both fp16 and bf16.
    """
    if args.torch_dtype is not None:
        dtype = getattr(torch, str(args.torch_dtype).replace("torch.", ""), None)
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise PlanError(
                f"{_where()}, --torch_dtype {args.torch_dtype}: it takes bfloat16, float16 and "
                "float32, spelled so. Write one of them."
            )
    if args.fp16 and args.bf16:
        raise PlanError(
            f"{_where()}, --fp16 true --bf16 true: Megatron takes one of them. Leave one out."
        )


def _complete(args: Any, model: Model) -> None:
    """Set the dtypes as ms-swift does; an fp32 model trains in fp16 unless ``fp16`` is False."""
    config = model.config
    name = args.torch_dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    dtype = parse_dtype(str(name)) or torch.bfloat16
    args.fp16 = dtype is not torch.bfloat16 if args.fp16 is None else args.fp16
    args.bf16 = dtype is torch.bfloat16 if args.bf16 is None else args.bf16
    args.torch_dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else dtype
    if not args.fp16 and args.bf16 and coerced(args.main_grads_dtype) is torch.float32:
        args.accumulate_allreduce_grads_in_fp32 = True
