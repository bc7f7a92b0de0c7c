"""Read the dtypes in which a verl job's actor, reference model and rollout compute.

The driver and ``precision-shim plan`` call the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from precision_shim.adapting import Decision, look, versioned
from precision_shim.precision.agreement import AUTO, Engine
from precision_shim.precision.dtypes import name_of, parse_dtype

from ...agreement.lm_head import IsInForce
from ...agreement.model_files import resolve_by_model
from ...agreement.names import engine_name, with_rounded
from ...agreement.report import FEATURE, Sides
from ..training import engines, fsdp
from .lm_head import read_heads

ROLLOUT = "actor_rollout_ref.rollout"

SECTIONS = ("trainer", "algorithm", "actor_rollout_ref", "distillation", "reward", "reward_model")
"""The sections of a job's config that this file reads."""


def read_sides(config: Mapping[str, Any], in_force: IsInForce) -> Sides | None:
    """Both sides of a PPO job, from its config as plain data; ``None`` without a rollout.

    Raises:
        DtypeError: a key's value is no dtype name.
    """
    _check_names(config)
    shared = _section(config, "actor_rollout_ref")
    actor, rollout = _section(shared, "actor"), _section(shared, "rollout")
    if not actor or not rollout:
        return None
    group = fsdp.group_of(_section(config, "trainer").get(fsdp.WORKERS))
    trainer = _of_role(actor, "actor", group)
    path, backend = str(_section(shared, "model").get("path") or ""), str(rollout.get("name"))
    others = [
        *_reference(config, shared, group, trainer),
        resolve_by_model(_of_rollout(rollout, "rollout", ROLLOUT), backend, path),
        *_teachers(config),
    ]
    because = f"the shim does not know what verl's {actor.get('strategy')} engine computes in"
    unknown = Decision("verl", "rollout", FEATURE, "not compared with the actor", because)
    decided, heads = () if trainer else (unknown,), read_heads(config, in_force)
    return Sides("verl", versioned("verl"), trainer, others, heads, decided)


def _check_names(config: Mapping[str, Any]) -> None:
    """Check the dtype names of reward models, whose dtype is not compared with the trainer's.

    Raises:
        DtypeError: a key's value is no dtype name.
    """
    new, old = (
        _section(_section(config, "reward"), "reward_model"),
        _section(config, "reward_model"),
    )
    if new.get("enable") or old.get("enable"):
        _of_rollout(_section(new, "rollout"), "reward model", "reward.reward_model.rollout")
        _of_rollout(_section(old, "rollout"), "reward model", "reward_model.rollout")


def _of_role(role: Mapping[str, Any], subject: str, group: str) -> Engine | None:
    """The engine of an actor or a reference model; ``None`` for an engine that the shim ignores."""
    strategy, place = str(role.get("strategy") or "fsdp"), f"actor_rollout_ref.{subject}"
    if strategy == "megatron":
        section, key = _section(role, "megatron"), f"{place}.megatron.dtype"
        value = section.get("dtype")
        dtype = parse_dtype(str(value or "bfloat16")) or torch.bfloat16
        return Engine(subject, name_of(dtype), key, value)
    if strategy not in ("fsdp", "fsdp2"):
        return _of_other(role, subject, strategy, place)
    section, key = _section(role, "fsdp_config"), f"{place}.fsdp_config"
    mixed = f"{key}.mixed_precision.param_dtype"
    if group == fsdp.LEGACY:
        own = f"{key}.dtype"
        dtype = fsdp.of_legacy_autocast(section, key)
        because = f"{own}: the dtype of verl's autocast, in which the matrix products run"
        return Engine(subject, name_of(dtype), own, section.get("dtype"), because)
    dtype = fsdp.computed(section, section=key)
    # From 0.8 verl's FSDP engine autocasts to FSDP's dtype, and not always to bfloat16.
    autocasts = "_autocast_dtype" in look(f"{fsdp.SHARDED}._build_fsdp_module").names
    if dtype is not torch.float32 and not autocasts:
        because = f"verl {fsdp.ENGINE}: it autocasts to bfloat16, whatever {mixed} says"
        return Engine(subject, "bf16", "", because=because)
    given = _section(section, "mixed_precision")
    prefix = "" if "param_dtype" in given else "++"
    return Engine(subject, name_of(dtype), mixed, given.get("param_dtype"), prefix=prefix)


def _of_other(role: Mapping[str, Any], subject: str, strategy: str, place: str) -> Engine | None:
    """The engine of a model that neither Megatron nor verl's FSDP engine runs."""
    if strategy == "fsdp_turbo":  # without the shim, it autocasts to bfloat16
        value = engines.turbo_plan(_section(role, "fsdp_config")).get("param_dtype")
        key = f"{place}.fsdp_config.{fsdp.COMPUTE_KEYS[strategy]}"
        computes = "fp16" if engines.is_fp16(value) else "bf16"
        return Engine(subject, computes, key, value, prefix="++")
    if strategy not in engines.FLAGGED:
        return None
    section, key = _section(role, strategy), f"{place}.{strategy}.dtype"
    dtype, why = engines.of_flag(strategy, section)
    key, prefix = "" if why else key, "" if "dtype" in section else "++"
    return Engine(subject, name_of(dtype), key, section.get("dtype"), why, prefix)


def _reference(
    config: Mapping[str, Any], shared: Mapping[str, Any], group: str, trainer: Engine | None
) -> Iterator[Engine]:
    actor, model = _section(shared, "actor"), _section(shared, "model")
    kl = actor.get("use_kl_loss") or _section(config, "algorithm").get("use_kl_in_reward")
    lora = model.get("lora_rank") or _section(model, "lora").get("rank")
    if not kl or lora or model.get("lora_adapter_path"):  # LoRA needs no reference model
        return
    ref = _section(shared, "ref")
    merged = {**ref, "strategy": ref.get("strategy") or actor.get("strategy")}
    if group == fsdp.LEGACY and merged["strategy"] == "megatron" and trainer is not None:
        # 0.7.1's legacy workers build the reference model in the actor's dtype.
        yield replace(trainer, subject="ref", because=trainer.key)
        return
    engine = _of_role(merged, "ref", group)
    if engine is not None:
        yield engine


def asked_dtype(section: Mapping[str, Any], place: str) -> tuple[str, str]:
    """Return a rollout's dtype, in the engine's spelling, and the config key that sets it.

    Raises:
        DtypeError: the value in the section, at ``place``, is no dtype in which an engine computes.
    """
    name = str(section.get("name") or "")
    inner, key = _section(_section(section, "engine_kwargs"), name), f"{place}.dtype"
    value = section.get("dtype", "bfloat16")
    if inner.get("dtype") is not None:  # ``engine_kwargs`` override the section's dtype
        value, key = inner["dtype"], f"{place}.engine_kwargs.{name}.dtype"
    # If the dtype is None, verl passes no dtype, and the engine chooses its dtype itself.
    return AUTO if value is None else engine_name(value, key, versioned("verl")), key


def _of_rollout(section: Mapping[str, Any], subject: str, place: str) -> Engine:
    asked, key = asked_dtype(section, place)
    inner = _section(_section(section, "engine_kwargs"), str(section.get("name") or ""))
    over = f"{place}.engine_kwargs.{section.get('name')}"
    dtype = None if asked == AUTO else parse_dtype(asked)
    prefix = "++" if "engine_kwargs" in key else ""
    computes = AUTO if dtype is None else name_of(dtype)
    engine = Engine(subject, computes, key, asked, prefix=prefix)
    engine = with_rounded(engine, inner, over)
    if inner.get("quantization"):
        return engine
    return with_rounded(engine, {"quantization": section.get("quantization")}, place)


def _teachers(config: Mapping[str, Any]) -> Iterator[Engine]:
    distillation = _section(config, "distillation")
    if not distillation.get("enabled"):
        return
    teachers = dict(_section(distillation, "teacher_models"))
    if len(teachers) > 1:  # verl ignores its default teacher if there are other teachers
        teachers.pop("teacher_model", None)
    for name, teacher in teachers.items():
        inference = _section(teacher, "inference") if isinstance(teacher, Mapping) else {}
        if inference:
            place = f"distillation.teacher_models.{name}.inference"
            yield _of_rollout(inference, f"teacher {name}", place)


def _section(section: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = section.get(key)
    return value if isinstance(value, Mapping) else {}
