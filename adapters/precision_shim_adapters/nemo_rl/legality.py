"""Check a policy's dtypes with the rules of NeMo-RL's workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from precision_shim.adapting import look, versioned
from precision_shim.planning.record import Problem, no_number, unknown_keys
from precision_shim.planning.values import said

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
_FLAGS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def names(
    section: Mapping[str, Any], key: str, subject: str, fields: Iterable[str]
) -> Iterator[Problem]:
    """Yield a problem for each present key whose value is not one of NeMo-RL's dtype names.

    Args:
        section: the config section of a policy, a value model or a teacher.
        key: the section's key in the config.
        subject: the model's name, such as ``"policy"``.
        fields: keys within the section; nested keys have dots.
    """
    for field in fields:
        value = _found(section, field)
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


def offload(section: Mapping[str, Any], key: str, subject: str, world: int) -> Iterator[Problem]:
    """Yield a problem if the v2 DTensor worker refuses offload to the CPU on one GPU."""
    cfg = section["dtensor_cfg"]
    if world > 1 or not (cfg.get("_v2") and cfg.get("cpu_offload")):
        return
    if "NotImplementedError" in look(f"{_AUTOMODEL}:setup_distributed").names:
        place = f"{key}.dtensor_cfg.cpu_offload"
        fault = f"{_who()} refuses {place}=true on one GPU"
        yield Problem("flags", subject, place, fault, f"Write {place}: false.")


_NULLS: Mapping[bool, tuple[str, ...]] = {
    True: (
        *("megatron_cfg.optimizer", "megatron_cfg.scheduler"),
        *("megatron_cfg.distributed_data_parallel_config", "megatron_cfg.peft"),
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

_SINCE = {
    "megatron_cfg.peft": (f"{SETUP}:setup_model_and_optimizer", "peft"),
    "dtensor_cfg.lora_cfg": ("nemo_rl.models.policy.lm_policy:Policy.__init__", "lora_cfg"),
}
"""Maps a key of ``_NULLS`` to a function of NeMo-RL, and to a name that the function's source has
only in versions that read the key."""

_AUTOMODEL = "nemo_rl.models.automodel.setup"
_BRIDGE = "megatron.bridge.training.config:SchedulerConfig.__init__"
_CORE = "megatron.training.config.training_config:SchedulerConfig.__init__"


def of_sections(section: Mapping[str, Any], key: str, unresolved: Iterable[str]) -> list[Problem]:
    """List problems with a trained model's ``null`` keys and with its learning rate scheduler.

    Args:
        section: the config section of a policy or a value model.
        key: the section's key in the config, which is the model's name.
        unresolved: the keys that cannot be resolved on this machine, and are ``None``.
    """
    on_megatron = bool((section.get("megatron_cfg") or {}).get("enabled"))
    problems = [
        Problem("missing", key, f"{key}.{field}", f"{_who()} needs a value here", "Write one.")
        for field in _NULLS[on_megatron]
        if _found(section, field) is None
        and f"{key}.{field}" not in unresolved
        and (field not in _SINCE or _SINCE[field][1] in look(_SINCE[field][0]).names)
    ]
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
    dtype = DTYPES[section.get("precision", "bfloat16")]
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
