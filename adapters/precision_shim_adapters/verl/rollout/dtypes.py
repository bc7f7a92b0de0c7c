"""Read the dtypes in which a verl job's actor, reference model and rollout compute.

The driver and ``precision-shim plan`` call the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from precision_shim.adapting import Decision, versioned
from precision_shim.adapting.dtypes import name_of, parse_dtype
from precision_shim.adapting.rollouts import AUTO, FP8, Engine, Format, formats

from ...agreement.lm_head import IsInForce
from ...agreement.model_files import gates_of, resolve_by_model
from ...agreement.names import engine_name, with_rounded
from ...agreement.report import FEATURE, Sides
from ..config import PPO, ROLLOUT, ModelConfig, of_ppo, qat_format
from ..config import section_of as _section
from .lm_head import read_heads

_LAYERS = "override_transformer_config"
_BLOCKWISE = Format(formats.in_e4m3(formats.BLOCKS, formats.ROWS))
"""What verl makes of the rollout's ``quantization=fp8``."""
SECTIONS = ("trainer", "algorithm", "actor_rollout_ref", "distillation", "reward", "reward_model")
"""The sections of a job's config that this file reads."""


def read_sides(config: Mapping[str, Any], in_force: IsInForce) -> Sides | None:
    """Both sides of a PPO job, from its config as plain data; ``None`` without a rollout.

    Raises:
        DtypeError: a key's value is no dtype name.
    """
    _check_names(config)
    rollout = _section(_section(config, PPO), "rollout")
    actor, ref, _ = of_ppo(config)
    if not actor.role or not rollout:
        return None
    trainer = actor.compared()
    trainer = None if trainer is None else replace(trainer, format=actor.format)
    path, backend = str(actor.model.get("path") or ""), str(rollout.get("name"))
    served = resolve_by_model(_of_rollout(rollout, "rollout", ROLLOUT), backend, path)
    others = [*_reference(ref, trainer), served, *_teachers(config)]
    layers, place = actor.get(_LAYERS, {}), f"{actor.engine_key}.{_LAYERS}.{{}}"
    on_megatron = trainer if actor.strategy == "megatron" else None
    gates = gates_of(on_megatron, [served], backend, path, layers, place=place)
    because = f"the shim does not know what verl's {actor.strategy} engine computes in"
    unknown = Decision("verl", "rollout", FEATURE, "not compared with the actor", because)
    decided: tuple[Decision, ...] = () if trainer else (unknown,)
    heads = read_heads(config, in_force)
    if _section(actor.role, "qat").get("enable") and not actor.reads_own_qat:
        key, own = f"{PPO}.actor.qat.enable", f"{actor.engine_key}.qat"
        because = f"{key}=True has no effect: verl reads {own}"
        decided += (Decision("verl", "actor", FEATURE, "not quantized by this key", because),)
    return Sides("verl", versioned("verl"), trainer, others, heads, decided, gates)


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


def _reference(ref: ModelConfig, trainer: Engine | None) -> Iterator[Engine]:
    if ref.unbuilt:
        return
    if ref.legacy and ref.strategy == "megatron" and trainer is not None:
        # 0.7.1's legacy workers build the reference model in the actor's dtype.
        yield replace(trainer, subject="ref", because=trainer.key)
    elif (engine := ref.compared()) is not None:
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
    engine = with_rounded(engine, inner, over, str(section.get("name")))
    if inner.get("quantization"):
        return engine
    qat, key = qat_format(section.get("qat"), f"{place}.qat"), f"{place}.quantization"
    if qat is not None:  # the section takes the actor's by an interpolation
        return replace(engine, format=qat)
    engine = replace(engine, quantizes={formats.forward_of(_BLOCKWISE): (key, "fp8")})
    if section.get("quantization") == "fp8":
        made = replace(_BLOCKWISE, key=f"{key}=fp8")
        return replace(engine, computes=FP8, key=key, because=made.key, format=made)
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
