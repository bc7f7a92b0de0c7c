"""Plan verl's jobs from their Hydra YAML and overrides.

Hydra composes the config that the entry point's decorator names, without an import of verl.
Plan and worker read optimizer settings with ``megatron.of_configs``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from precision_shim.adapting import look, version_of, versioned
from precision_shim.errors import DtypeError, PlanError
from precision_shim.planning.command import Job
from precision_shim.planning.record import STATES, WEIGHTS, Problem
from precision_shim.planning.request import Illegal, Plannable, Request
from precision_shim.planning.shapes import Model
from precision_shim.planning.values import (
    mapping,
    no_adapters,
    number_of,
)
from precision_shim.precision.dtypes import name_of, parse_dtype

from ..fp16.plan import ShardedModel, scaling
from ..megatron import DISPATCH, GROUP, PRECISION_AWARE, RequestedConfig
from ..megatron.planning.plan import MegatronModel
from ..megatron.planning.sizes import read_sizes
from ..resolving import tell_missing, tell_unresolved
from ..rollout import FEATURE, problems_of, problems_of_heads
from . import driver, fsdp, megatron, sections, sides, sync, values
from .composing import SEARCH_PATH, compose, named_config
from .head import read_heads
from .planned import Sharded, read_sharded
from .sections import Place, Section

_ENGINES = ("megatron", "fsdp", "fsdp2", "fsdp_turbo", "veomni", "automodel", "torchtitan")
_SHARED = "actor_rollout_ref"


def _where() -> str:
    return versioned("verl")


def plan_job(job: Job) -> Request:
    """Read a command line that launches a verl job.

    Raises:
        PlanError: the config or a model cannot be read.
    """
    unresolved: list[str] = []
    missing: list[str] = []
    config = compose(job, unresolved, missing)
    problems: list[Problem] = []
    notes: list[str] = []
    if _SHARED in config:
        world, key = _gpus(config), "trainer.n_gpus_per_node x trainer.nnodes"
        problems = list(sections.missing(missing, _read_by_ppo(config)))
        found = [] if problems else list(_of_ppo(job, config, world, key, unresolved))
    elif "engine" in config and "optim" in config:
        world, key = _processes(job, config)
        problems = list(sections.missing(missing, ("engine", "optim", "model")))
        read = partial(sections.of_tuning, unresolved=unresolved, dispatches=_dispatches(job))
        found = [] if problems else [read(Place("actor", "", world, key), config)]
    else:
        raise PlanError(
            f"{_where()}, {job.target}: its config trains no model: expected actor_rollout_ref, or "
            "model, engine and optim. Plan the job that trains."
        )
    models = tuple(_model(job, one) for one in found)
    if _SHARED in config and not problems:
        problems, notes = _both_sides(job, config, unresolved)
    problems += [fault for one in found if one.trains for fault in values.problems(one, unresolved)]
    return Request(
        "verl",
        version_of("verl", ("verl",)),
        world,
        models,
        megatron=any(isinstance(model, MegatronModel) for model in models),
        problems=tuple(problems),
        notes=(*notes, *tell_unresolved(unresolved), *_tell_missing(config, missing, problems)),
    )


def _read_by_ppo(config: Mapping[str, Any]) -> list[str]:
    """Keys that a PPO job certainly reads; a section's key means all keys in the section."""
    trainer = ("trainer.n_gpus_per_node", "trainer.nnodes")
    models = [f"{_SHARED}.actor", f"{_SHARED}.model"]
    if _has_reference(config):
        models.append(f"{_SHARED}.ref")
    if _has_critic(config):
        models.append("critic")
    return [*trainer, *models]


def _tell_missing(
    config: Mapping[str, Any], missing: Sequence[str], problems: Sequence[Problem]
) -> list[str]:
    """Write a note on keys with ``???``, except keys in ``problems`` and in unused sections."""
    told = {problem.key for problem in problems}
    reward = _of(_of(config, "reward"), "reward.reward_model")
    unused: tuple[str, ...] = () if _has_critic(config) else ("critic.",)
    unused += () if reward.get("enable") else ("reward.reward_model.", "reward_model.")
    return tell_missing([key for key in missing if key not in told and not key.startswith(unused)])


def _both_sides(
    job: Job, config: Mapping[str, Any], unresolved: Sequence[str]
) -> tuple[list[Problem], list[str]]:
    """Predict the report of ``driver.compare_engines`` about actor, reference and rollout."""
    rollout = _of(_of(config, _SHARED), sides.ROLLOUT)
    kwargs = f"{sides.ROLLOUT}.engine_kwargs"
    over = sections.with_keys(rollout.get("engine_kwargs", {}), kwargs, unresolved)
    _of(over, f"{kwargs}.{rollout.get('name')}")
    asked = named_config(job)
    own = all(sides.is_verls(source) for source in asked.sources) and not any(
        override.startswith(SEARCH_PATH) for override in asked.overrides
    )
    written = sides.written_by(asked.overrides, own=own)
    try:
        sides.check_names(config)
        both = sides.read_sides(config, written)
    except DtypeError as error:
        return [Problem.of(error, "", error.key)], []
    if both is None:
        return [], []
    on = job.in_force(FEATURE, driver.GROUP)
    fault, remedy = sides.refuses_quantization(rollout)
    key = f"{sides.ROLLOUT}.quantization"
    refused = [Problem("flags", "rollout", key, fault, remedy)] if fault else []
    heads = problems_of_heads(
        versioned("verl"), partial(read_heads, config, job.in_force), job.settings, on=on
    )
    if both.trainer is None:
        unknown = "rollout: {}: {} ({})".format(FEATURE, *sides.unknown_engine(both))
        return [*refused, *heads[0]], [unknown, *heads[1]]
    problems, notes = problems_of(
        versioned("verl"),
        both.trainer,
        both.others,
        job.settings,
        on=on,
        model_type=both.model_type,
    )
    refusal, _ = sync.refuses_delta(rollout, both.strategy)
    if refusal:
        message, _, remedy = refusal.rpartition(". ")
        key = f"{sides.ROLLOUT}.checkpoint_engine.backend"
        problems.append(Problem("rollout-dtype", "rollout", key, message, remedy))
    return [*refused, *problems, *heads[0]], [*notes, *heads[1]]


def _gpus(config: Mapping[str, Any]) -> int:
    trainer = _of(config, "trainer")
    for key in ("n_gpus_per_node", "nnodes"):
        value = trainer.get(key)
        if isinstance(value, str):  # Python would compute "8" * 2 as "88"
            raise PlanError(
                f"{_where()}, trainer.{key}={value!r}: a text, expected a number. Write it without "
                "quotes. To read it from an environment variable, write "
                "'${oc.decode:${oc.env:NAME}}', with the quotes."
            )
    return _number(trainer, "trainer.n_gpus_per_node") * _number(trainer, "trainer.nnodes")


def _number(config: Mapping[str, Any], key: str, default: int = 1) -> int:
    return number_of(config, key, _where(), default)


def _of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key.rpartition(".")[2])
    return {} if value is None else mapping(value, key, _where())


def _processes(job: Job, config: Mapping[str, Any]) -> tuple[int, str]:
    """The number of GPUs of a job that torchrun starts, and the number's config key."""
    each = job.launched("nproc-per-node")
    nodes = job.launched("nnodes")
    if each is not None:
        return each * (nodes or 1), "--nproc-per-node x --nnodes"
    return _gpus(config), "trainer.n_gpus_per_node x trainer.nnodes"


def _of_ppo(
    job: Job, config: Mapping[str, Any], world: int, key: str, unresolved: Sequence[str]
) -> Iterator[Section]:
    shared = _of(config, _SHARED)
    actor = mapping(shared.get("actor"), f"{_SHARED}.actor", _where())
    model = sections.with_keys(shared.get("model"), f"{_SHARED}.model", unresolved)
    ref, critic = _of(shared, f"{_SHARED}.ref"), _of(config, "critic")
    group = fsdp.group_of(_of(config, "trainer").get(fsdp.WORKERS))
    read = partial(sections.of_role, unresolved=unresolved, dispatches=_dispatches(job))
    yield read(Place("actor", f"{_SHARED}.actor", world, key, group), actor, model)
    if _has_reference(config):
        merged = {**ref, "strategy": ref.get("strategy") or actor.get("strategy")}
        yield read(Place("ref", f"{_SHARED}.ref", world, key), merged, model)
    if _has_critic(config):
        inner = sections.with_keys(critic.get("model"), "critic.model", unresolved)
        yield read(Place("critic", "critic", world, key, group), critic, inner)


def _has_reference(config: Mapping[str, Any]) -> bool:
    actor = _of(_of(config, _SHARED), f"{_SHARED}.actor")
    return bool(_of(config, "algorithm").get("use_kl_in_reward") or actor.get("use_kl_loss"))


def _has_critic(config: Mapping[str, Any]) -> bool:
    enabled = _of(config, "critic").get("enable")
    return bool(
        enabled or (enabled is None and _of(config, "algorithm").get("adv_estimator") == "gae")
    )


def _dispatches(job: Job) -> bool:
    return job.in_force(DISPATCH, GROUP)


def _lora(model: Mapping[str, Any]) -> int:
    inner = model.get("lora")
    inner = inner if isinstance(inner, Mapping) else {}
    return _number(model, "model.lora_rank", 0) or _number(inner, "model.lora.rank", 0)


def _model(job: Job, section: Section) -> Plannable:
    if section.strategy not in _ENGINES:
        raise PlanError(
            f"{_where()}, {section.at.key or 'engine'}.strategy={section.strategy!r}: planned are "
            f"{', '.join(_ENGINES)}. Plan the job with one of these."
        )
    if _lora(section.model):
        off = "model.lora_rank=0, model.lora.rank=0"
        raise no_adapters(f"{_where()}, {section.at.subject}", off)
    path = section.model.get("hf_config_path") or section.model.get("path")
    overrides = section.model.get("override_config") or {}
    overrides = overrides.get("model_config") or {
        key: value
        for key, value in overrides.items()
        if key not in ("moe_config", "attn_implementation", "model_config")
    }
    shapes = job.model(path, {k: v for k, v in overrides.items() if v is not None})
    value = section.at.subject == "critic"
    if section.strategy == "megatron":
        return _on_megatron(section, shapes, value)
    return _sharded(job, section, shapes, value)


def _on_megatron(section: Section, model: Model, value: bool) -> Plannable:
    engine, optim = section.engine, section.optim
    subject, keys = section.at.subject, (section.engine_key, section.optim_key)
    illegal = [*section.illegal, *sections.of_megatron(engine, optim, keys, subject)]
    try:
        wishes = megatron.of_configs(
            engine,
            optim,
            subject=subject,
            declared=parse_dtype(str(engine.get("dtype") or "bfloat16")),
            trains=section.trains,
        )
    except DtypeError as error:  # ``of_megatron`` may have reported the dtype
        known = any(problem.code == "dtype" for problem in illegal)
        illegal += [] if known else [Problem.of(error, subject, error.key)]
        return Illegal(subject, tuple(illegal))
    bucket_key = f"{section.engine_key}.override_ddp_config"
    return MegatronModel(
        wishes,
        model,
        read_sizes(
            section.at.world,
            section.at.world_key,
            section.engine_key,
            engine,
            sequence_parallel=bool(engine.get("sequence_parallel", True)),
            within="override_transformer_config",
        ),
        wishes.declared or torch.bfloat16,
        bucket_in_fp32=_bucket(section, wishes),
        value_head=value,
        key=f"{section.optim_key}.override_optimizer_config.{{}}",
        bucket_key=f"{bucket_key}.grad_reduce_in_fp32",
        bucket_keys=tuple(map(str, _of(engine, bucket_key))),
        prefix="++",  # Hydra's prefix that adds or overrides a key
        parked=_find_parked(section),
        illegal=tuple(illegal),
    )


def _bucket(section: Section, wishes: RequestedConfig) -> bool:
    """verl's value of ``grad_reduce_in_fp32`` if the user wrote none.

    verl's ``get_model`` and mbridge set ``grad_reduce_in_fp32`` to True, Megatron-Bridge to False.
    In verl 0.9 and later, the engine derives ``grad_reduce_in_fp32`` from the optimizer's fields.
    """
    aware = bool(wishes.opt_in.get(PRECISION_AWARE))
    low = wishes.opt_in.get("main_grads_dtype", torch.float32) is not torch.float32
    resolver = look(f"{megatron.ENGINE}._resolve_override_ddp_config")
    if resolver.found and aware and low:
        return False
    if resolver.found and "use_low_precision_main_grads" in resolver.names:
        return True
    engine = section.engine
    return not (engine.get("use_mbridge") and engine.get("vanilla_mbridge") is False)


def _find_parked(section: Section) -> dict[str, tuple[str, ...]]:
    """The components that verl moves to the host's memory while a model is not used."""
    return {
        f"{section.engine_key}.{key}": components
        for key, components in (
            ("param_offload", WEIGHTS),
            ("optimizer_offload", STATES),
        )
        if section.engine.get(key)
    }


def _sharded(job: Job, section: Section, model: Model, value: bool) -> Plannable:
    engine, optim = section.engine, section.optim
    subject, trains, strategy = section.at.subject, section.trains, section.strategy
    illegal = [*section.illegal]
    if trains and strategy not in ("veomni", "torchtitan"):
        illegal += sections.of_torch_optimizer(optim, section.optim_key, subject)
    try:
        sharded = read_sharded(
            strategy,
            engine,
            section.engine_key,
            group=section.at.group,
            subject=subject,
            trains=trains,
        )
    except DtypeError as error:
        return Illegal(subject, (*illegal, Problem.of(error, subject, error.key)))
    # verl always keeps a forward-only model in the host's memory, even without ``param_offload``.
    forward_only = engine.get("forward_only", True) or engine.get("param_offload")
    on_host = engine.get("offload_policy") if trains else forward_only
    compute = name_of(sharded.compute)
    scaled = scaling(
        job, compute, sharded.group, sharded.because, framework_default=fsdp.VERLS_SCALER
    )
    keys = {name: f"{section.engine_key}.{key}" for name, key in sharded.sizes.items()}
    sizes: dict[str, Any] = {
        name: _number(engine, key, -1 if name == "shards" else 1) for name, key in keys.items()
    }
    if section.sequence > 1:  # the model's own Ulysses size overrides the engine's
        sizes["context"] = section.sequence
    name = str(optim.get("optimizer") or optim.get("name") or "AdamW")
    of_fsdp = strategy in ("fsdp", "fsdp2")
    name = "AdamW" if name == "adamw" else name
    if trains and scaled and sharded.stored is torch.float16:
        stored = f"{section.engine_key}.model_dtype"
        illegal += sections.of_fp16_moments(optim, stored, name, subject)
    return ShardedModel(
        section.at.subject,
        model,
        section.at.world,
        name_of(sharded.stored),
        **sizes,
        compute=compute,
        reduce=name_of(sharded.reduce),
        optimizer=name if trains else "",
        decisions=scaled if trains else (),
        offload=bool(on_host) and not (trains and strategy == "fsdp"),
        value_head=value,
        keys={
            "world": section.at.world_key,
            "optimizer": f"{section.optim_key}.optimizer",
            **keys,
        },
        parked={} if on_host else _find_parked(section),
        illegal=tuple(illegal),
        notes=_notes(engine, sharded, of_fsdp) if trains else (),
    )


def _notes(engine: Mapping[str, Any], sharded: Sharded, of_fsdp: bool) -> tuple[str, ...]:
    ignored = fsdp.find_ignored(engine, sharded.compute) if of_fsdp else ()
    return (*ignored, sharded.note) if sharded.note else tuple(ignored)
