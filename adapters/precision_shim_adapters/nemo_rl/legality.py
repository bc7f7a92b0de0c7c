"""Check a policy's dtypes with the rules of NeMo-RL's workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from precision_shim.adapting import look, versioned
from precision_shim.planning.record import Problem, no_number, unknown_keys
from precision_shim.planning.values import said

from ..fp16.legality import of_class
from ..fp16.plan import of_torch
from ..megatron import PRECISION_AWARE
from ..megatron.deciding.numbers import STYLES
from .dtensor import FRAMEWORK
from .places import POLICIES, SETUP

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtype names that NeMo-RL accepts; for other names NeMo-RL raises KeyError or ValueError."""

_CHECKS = (
    f"{SETUP}:_validate_dtype_config",
    *(f"{POLICIES[1]}:MegatronPolicyWorker{end}.__init__" for end in ("", "Impl")),
)
"""NeMo-RL's functions that check the optimizer's flags, in NeMo-RL 0.5 and later."""
_ABSENT = object()
_POLICY = "nemo_rl.models.policy"
_FLAGS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def names(
    section: Mapping[str, Any], key: str, subject: str, fields: Iterable[str]
) -> Iterator[Problem]:
    """Yield a problem for each key whose value is not one of NeMo-RL's dtype names.

    Only ``precision`` has to be there.

    Args:
        section: the config section of a policy, a value model or a teacher.
        key: the section's key in the config.
        subject: the model's name, such as ``"policy"``.
        fields: keys within the section; nested keys have dots.
    """
    for field in fields:
        value = section.get(field) if field == "precision" else _found(section, field)
        if value is not _ABSENT and (not isinstance(value, str) or value not in DTYPES):
            yield Problem(
                "dtype",
                subject,
                f"{key}.{field}",
                f"{versioned(FRAMEWORK)}: {key}.{field}={value!r} names no dtype that NeMo-RL "
                f"takes; allowed: {', '.join(DTYPES)}, spelled so",
                f"Correct {key}.{field}.",
            )


def torch_optimizer(section: Mapping[str, Any], key: str, subject: str) -> Iterator[Problem]:
    """Yield a problem if NeMo-RL cannot find or construct a DTensor worker's optimizer."""
    optimizer = section.get("optimizer") or {}
    if optimizer.get("name") is None:  # the optimizer's name is missing or an unresolved reference
        return
    place = f"{key}.optimizer.name"
    module, _, name = str(optimizer["name"]).rpartition(".")
    if module == "torch.optim":
        keys = place, f"{key}.optimizer.kwargs.{{}}"
        yield from of_torch(name, optimizer.get("kwargs") or {}, keys, subject)
    elif not module:
        yield Problem(
            "key",
            subject,
            place,
            f"{versioned(FRAMEWORK)}: {place}={optimizer['name']!r} is no class with its module",
            "Write one, such as torch.optim.AdamW.",
        )
    else:
        yield from of_class(module, name, (place, place), subject, versioned(FRAMEWORK))


def offload(section: Mapping[str, Any], key: str, subject: str, world: int) -> Iterator[Problem]:
    """Yield a problem if the v2 DTensor worker refuses offload to the CPU on one GPU."""
    cfg = section["dtensor_cfg"]
    if world > 1 or not (cfg.get("_v2") and cfg.get("cpu_offload")):
        return
    if "NotImplementedError" in look(f"{_AUTOMODEL}:setup_distributed").names:
        place = f"{key}.dtensor_cfg.cpu_offload"
        fault = f"{_who()} refuses {place}=true on one GPU"
        yield Problem("flags", subject, place, fault, f"Write {place}: false.")


_LATER = (
    *("moe_enable_deepep", "moe_token_dispatcher_type", "moe_shared_expert_overlap"),
    *("bias_activation_fusion", "gradient_accumulation_fusion", "use_fused_weighted_squared_relu"),
)
"""Keys of ``megatron_cfg`` that older versions of NeMo-RL lack."""

_MEGATRON = (
    *("activation_checkpointing", "apply_rope_fusion", "freeze_moe_router", "pipeline_dtype"),
    *("moe_permute_fusion", "moe_router_bias_update_rate", "moe_router_dtype", "train_iters"),
    *("moe_router_load_balancing_type", "sequence_parallel", "context_parallel_size"),
    *(f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert")),
    *(f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")),
    *("expert_tensor_parallel_size", *_LATER),
)
_OPTIMIZER = ("use_distributed_optimizer", "optimizer_cpu_offload", "optimizer_offload_fraction")
_BUCKET = "megatron_cfg.distributed_data_parallel_config"
_DDP = (
    *("grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather"),
    "data_parallel_sharding_strategy",
)

_NULLS: Mapping[bool, tuple[str, ...]] = {
    True: (
        *("megatron_cfg.optimizer", "megatron_cfg.scheduler"),
        *(_BUCKET, "megatron_cfg.peft"),
        *(f"megatron_cfg.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model")),
        "megatron_cfg.context_parallel_size",
    ),
    False: (
        *("optimizer", "optimizer.name", "optimizer.kwargs", "scheduler"),
        *("dtensor_cfg.tensor_parallel_size", "dtensor_cfg.context_parallel_size"),
        *("dtensor_cfg.lora_cfg", "sequence_packing", "tokenizer"),
    ),
}
"""The keys that NeMo-RL's workers read without a check for ``null``, on Megatron and on DTensor."""

NEEDED: Mapping[bool, tuple[str, ...]] = {
    True: (
        *("train_global_batch_size", "offload_optimizer_for_logprob"),
        *(f"megatron_cfg.{name}" for name in ("optimizer", "scheduler", *_MEGATRON)),
        *(f"megatron_cfg.optimizer.{name}" for name in ("lr", "min_lr", *_OPTIMIZER)),
        *(f"megatron_cfg.scheduler.{end}_weight_decay" for end in ("start", "end")),
        *(f"{_BUCKET}{name}" for name in ("", *(f".{field}" for field in _DDP))),
    ),
    False: (
        *("optimizer", "optimizer.name", "optimizer.kwargs", "max_grad_norm"),
        *("sequence_packing", "sequence_packing.enabled", "tokenizer", "tokenizer.name"),
        *("dtensor_cfg.cpu_offload", "dtensor_cfg.sequence_parallel"),
        "dtensor_cfg.activation_checkpointing",
        *("dtensor_cfg.tensor_parallel_size", "dtensor_cfg.context_parallel_size"),
    ),
}
"""The keys that NeMo-RL reads without a default for a worker on Megatron and on DTensor."""

_SINCE = {
    **{f"megatron_cfg.{name}": (f"{_POLICY}:MegatronConfig", name) for name in _LATER},
    "offload_optimizer_for_logprob": (
        f"{SETUP}:validate_and_set_config",
        "offload_optimizer_for_logprob",
    ),
    "megatron_cfg.peft": (f"{SETUP}:setup_model_and_optimizer", "peft"),
    "dtensor_cfg.lora_cfg": (f"{_POLICY}.lm_policy:Policy.__init__", "lora_cfg"),
}
"""Maps a key of ``_NULLS`` or ``NEEDED`` to a symbol and a name.

A version of NeMo-RL reads the key if the key's symbol there contains the name.
"""

_AUTOMODEL = "nemo_rl.models.automodel.setup"
_BRIDGE = "megatron.bridge.training.config:SchedulerConfig.__init__"
_CORE = "megatron.training.config.training_config:SchedulerConfig.__init__"


def of_sections(section: Mapping[str, Any], key: str, unresolved: Iterable[str]) -> list[Problem]:
    """List problems with a trained model's keys, missing or ``null``, and with its LR scheduler.

    Args:
        section: the config section of a policy or a value model.
        key: the section's key in the config, which is the model's name.
        unresolved: the keys that cannot be resolved on this machine, and are ``None``.
    """
    on_megatron = bool((section.get("megatron_cfg") or {}).get("enabled"))
    told, unknown = list[str](), tuple(f"{name}." for name in unresolved)
    for nothing, fields in ((None, _NULLS), (_ABSENT, NEEDED)):
        for field in fields[on_megatron]:
            within = f"{key}.{field}.".startswith((*unknown, *(f"{name}." for name in told)))
            target, name = _SINCE.get(field, ("", ""))
            read = not target or name in look(target).names
            if _found(section, field) is nothing and read and not within:
                told.append(f"{key}.{field}")
    fault = f"{_who()} needs a value here"
    problems = [Problem("missing", key, place, fault, "Write one.") for place in told]
    if on_megatron:
        problems += _of_scheduler(section["megatron_cfg"].get("scheduler"), key, unresolved)
    elif not any(f"{name}.".startswith(f"{key}.scheduler.") for name in unresolved):
        problems += _of_torch_scheduler(section.get("scheduler"), key)
    return problems


def _of_torch_scheduler(scheduler: Any, subject: str) -> Iterator[Problem]:
    """Yield a problem for each of torch's schedulers that a DTensor worker cannot make."""
    key = f"{subject}.scheduler"
    if scheduler is None:
        return
    for one in [scheduler] if isinstance(scheduler, Mapping | str) else scheduler:
        entry = one if isinstance(one, Mapping) else {}
        name = str(entry.get("name", ""))
        if not name:
            if "milestones" not in entry:
                fault = f"{one!r} has neither name nor milestones"
                yield Problem("key", subject, key, fault, "Write a scheduler's name and kwargs.")
            continue
        module, _, kind = name.rpartition(".")
        if module != "torch.optim.lr_scheduler":
            continue
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        try:
            getattr(torch.optim.lr_scheduler, kind)(optimizer, **entry["kwargs"])
        except Exception as error:  # torch raises various errors
            yield Problem("number", subject, key, f"{name}: {said(error)}", "Correct it.")


def _who() -> str:
    return f"{versioned(FRAMEWORK)}: its worker"


def _found(section: Mapping[str, Any], field: str) -> Any:
    value: Any = section
    for part in field.split("."):
        value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
    return value


def _of_scheduler(scheduler: object, subject: str, unresolved: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each scheduler setting that Megatron-Bridge refuses."""
    key = f"{subject}.megatron_cfg.scheduler"
    if scheduler is None:
        return
    if not isinstance(scheduler, Mapping):
        yield Problem("key", subject, key, f"{scheduler!r} has no keys", "Write a section.")
        return
    known = look(_BRIDGE).parameters or look(_CORE).parameters
    names = list(map(str, scheduler))
    yield from unknown_keys(names, known, subject, f"{key}.{{}}", "Megatron's SchedulerConfig")
    for name in ("start_weight_decay", "end_weight_decay", "lr_warmup_init", "lr_warmup_iters"):
        value = scheduler.get(name, 0)
        if not isinstance(value, int | float) and f"{key}.{name}" not in unresolved:
            yield no_number(value, subject, f"{key}.{name}")
    style = scheduler.get("lr_decay_style", STYLES[0])
    if style not in STYLES and f"{key}.lr_decay_style" not in unresolved:
        fault = f"Megatron has no {style!r}; allowed: {', '.join(STYLES)}"
        yield Problem("number", subject, f"{key}.lr_decay_style", fault, "Write one of them.")


def of_megatron(section: Mapping[str, Any], key: str, subject: str) -> Iterator[Problem]:
    """Yield a problem for each optimizer flag that NeMo-RL refuses because of ``precision``."""
    if not any("use_precision_aware_optimizer" in look(function).names for function in _CHECKS):
        return  # NeMo-RL 0.4 checks no flags
    dtype = DTYPES[section["precision"]]
    optimizer = section["megatron_cfg"].get("optimizer") or {}
    place = f"{key}.megatron_cfg.optimizer"
    if all(optimizer.get(flag, False) for flag in _FLAGS.values()):
        yield Problem(
            "flags",
            subject,
            f"{place}.fp16",
            f"{versioned(FRAMEWORK)}: fp16=true and bf16=true: Megatron-Bridge takes one of them",
            f"Write false for the other one than {key}.precision.",
        )
        return
    if dtype is torch.float32:
        for flag in _FLAGS.values():
            if optimizer.get(flag, False):
                yield Problem(
                    "flags",
                    subject,
                    f"{place}.{flag}",
                    f"{versioned(FRAMEWORK)}: {flag}=true beside {key}.precision=float32",
                    f"Write {place}.{flag}: false.",
                )
        return
    flag = _FLAGS[dtype]
    if optimizer.get(PRECISION_AWARE, False) and not optimizer.get(flag, False):
        other = _FLAGS[torch.bfloat16 if dtype is torch.float16 else torch.float16]
        yield Problem(
            "flags",
            subject,
            f"{place}.{flag}",
            f"{versioned(FRAMEWORK)}: {flag}={str(optimizer.get(flag, False)).lower()} beside "
            f"{key}.precision={section.get('precision')} and {PRECISION_AWARE}=true",
            f"Write {place}.{flag}: true and {place}.{other}: false.",
        )


def of_generation(config: Mapping[str, Any], unresolved: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each dtype in vLLM's section that NeMo-RL's GRPO refuses.

    Args:
        config: the job's config.
        unresolved: the keys that cannot be resolved on this machine, and are ``None``.
    """
    policy, place = config["policy"], "policy.generation.vllm_cfg"
    generation = policy.get("generation") or {}
    names_read = look("nemo_rl.algorithms.grpo:setup").names
    if "grpo" not in config or generation.get("backend") != "vllm":
        return
    vllm = generation.get("vllm_cfg") or {}
    is_fp8, cache = vllm.get("precision") == "fp8", str(vllm.get("kv_cache_dtype"))
    correction = "use_importance_sampling_correction"
    faults: list[tuple[str, str, str]] = []
    if is_fp8 and correction in names_read and not (config.get("loss_fn") or {}).get(correction):
        fault = f"{place}.precision=fp8 needs loss_fn.{correction}=true"
        faults.append((f"loss_fn.{correction}", fault, "Write true."))
    if "kv_cache_dtype" in names_read:
        key = f"{place}.kv_cache_dtype"
        if vllm.get("kv_cache_dtype") is None and key not in unresolved:
            faults.append((key, f"{key} is missing, and has no default", "Write auto."))
        elif cache.startswith("fp8") and not is_fp8:
            fault = f"{key}={cache} needs {place}.precision=fp8"
            faults.append((key, fault, f"Write auto, or {place}.precision=fp8."))
        elif cache.startswith("fp8") and (policy.get("dtensor_cfg") or {}).get("enabled"):
            fault = f"{key}={cache} is refused beside policy.dtensor_cfg.enabled=true"
            faults.append((key, fault, "Write auto, or train on Megatron."))
        elif is_fp8 and cache not in ("auto", "fp8", "fp8_e4m3"):
            fault = f"{key}={cache!r}: its worker takes auto, fp8 or fp8_e4m3"
            faults.append((key, fault, "Write one of them."))
    for key, fault, remedy in faults:
        yield Problem("flags", "rollout", key, f"{versioned(FRAMEWORK)}: {fault}", remedy)
