"""Plan NeMo-RL's jobs from a YAML file, the YAML files that it inherits from, and overrides.

NeMo-RL's own loader, which needs hydra but not torch, reads the YAML files. As in a worker,
``nemo_rl.megatron`` reads the optimizer's ``RequestedConfig`` from the config.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from precision_shim.adapting import version_of
from precision_shim.errors import DtypeError, PlanError
from precision_shim.planning.command import Job
from precision_shim.planning.record import STATES, WEIGHTS, Decided, Problem
from precision_shim.planning.request import Illegal, Plannable, Request
from precision_shim.planning.shapes import is_router
from precision_shim.planning.values import mapping, no_adapters, number_of, said
from precision_shim.precision.dtypes import name_of

from ..fp16.plan import ShardedModel, scaling
from ..megatron.planning.plan import MegatronModel
from ..megatron.planning.sizes import read_sizes
from ..resolving import MISSING, plain, tell_unresolved
from ..rollout import FEATURE, problems_of, problems_of_heads
from . import dtensor, legality, megatron, sides
from .dtensor import FRAMEWORK

_ROLES = {"policy": "policy", "value": "value", "teacher": "teacher"}
_DEFAULT = re.compile(r"[\"']([\w./-]+\.ya?ml)[\"']")

_OPTION = re.compile(r"add_argument\(\s*[\"'](--[\w-]+)[\"']")


def plan_job(job: Job) -> Request:
    """Read a command line that launches a NeMo-RL job.

    Raises:
        PlanError: the config or a model cannot be read.
    """
    unresolved: list[str] = []
    config = load(job, unresolved)
    if not config.get("policy") or not config.get("cluster"):
        raise PlanError(
            f"{_where()}, {job.target}: its config trains no model: expected policy and cluster. "
            "Plan the job that trains."
        )
    _check_sections(config, unresolved)
    world = _gpus(config)
    models = tuple(_models(job, config, world))
    problems, notes = _both_sides(job, config)
    problems += legality.of_generation(config, unresolved)
    for key in _ROLES:
        section = config.get(key)
        if key != "teacher" and isinstance(section, Mapping) and section.get("model_name"):
            problems += legality.of_sections(section, key, unresolved)
    return Request(
        FRAMEWORK,
        version_of(FRAMEWORK, ("nemo_rl",)),
        world,
        models,
        megatron=any(isinstance(model, MegatronModel) for model in models),
        problems=tuple(problems),
        notes=(*notes, *tell_unresolved(unresolved)),
    )


def _both_sides(job: Job, config: Mapping[str, Any]) -> tuple[list[Problem], list[str]]:
    """Predict the driver's report on the dtypes of policy, rollout and teacher."""
    try:
        generation = config["policy"].get("generation")
        if generation:
            sides.coerce_names(generation)
        both = sides.read_sides(config)
    except DtypeError as error:
        return [Problem.of(error, "rollout", error.key)], []
    on = job.in_force(FEATURE, sides.GROUP)
    problems: list[Problem] = []
    notes: list[str] = []
    if generation:
        problems, notes = problems_of_heads(_where(), sides.read_heads, job.settings, on=on)
    if both is None:
        return problems, notes
    others, kind = both.others, both.kind
    found, told = problems_of(_where(), both.trainer, others, job.settings, on=on, model_type=kind)
    return [*found, *problems], [*told, *notes]


def _where() -> str:
    return f"nemo-rl {version_of(FRAMEWORK, ('nemo_rl',))}"


def load(job: Job, unresolved: list[str] | None = None) -> dict[str, Any]:
    """Load a job's config, and apply its overrides.

    Args:
        job: the job.
        unresolved: see ``plain``.

    Raises:
        PlanError: NeMo-RL cannot load the config.
    """
    try:
        from nemo_rl.utils import config as loader
        from omegaconf import OmegaConf
    except ImportError as error:
        raise PlanError(
            f"{_where()}: its loader of configs cannot be imported ({error}). Install NeMo-RL here."
        ) from error
    path, overrides = _find_named(job)
    register = getattr(loader, "register_omegaconf_resolvers", None)
    if register is not None:
        register()
    else:  # up to NeMo-RL 0.5 each example registers the resolver ``mul``
        OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)
    try:
        made = loader.load_config(path)
        if overrides:
            made = loader.parse_hydra_overrides(made, overrides)
        # NeMo-RL's entry points turn a config into plain data, in which MISSING is a string.
        config = plain(made, unresolved=unresolved, missing=lambda key: MISSING)
    except Exception as error:  # reading files, YAML, hydra and omegaconf raise various errors
        raise PlanError(
            f"{_where()}, {path}: {said(error)}. Correct the override or the file."
        ) from error
    if not isinstance(config, dict):
        raise PlanError(f"{_where()}, {path}: expected a mapping of keys. Correct the file.")
    return {str(key): value for key, value in config.items()}


def _find_named(job: Job) -> tuple[Path, list[str]]:
    """The path of a job's config file, and its overrides, parsed as in NeMo-RL's examples."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", default="")
    named, overrides = parser.parse_known_args(list(job.arguments))
    overrides = [word for word in overrides if not _is_option(word, job.source)]
    path = Path(named.config) if named.config else _default(job)
    if not path.is_file():
        raise PlanError(
            f"{_where()}, {path}: there is no such file; expected the YAML of --config. Start from "
            "the directory that the job starts in."
        )
    return path, overrides


def _is_option(word: str, source: Path | None) -> bool:
    """Whether a word is an option of the job's own script; NeMo-RL refuses all other options."""
    if not word.startswith("--"):
        return False
    declared = None if source is None else _OPTION.findall(source.read_text(encoding="utf-8"))
    return declared is None or word.partition("=")[0] in declared


def _default(job: Job) -> Path:
    """The path of an example's default config file, found in the example's source."""
    if job.source is None:
        raise PlanError(
            f"{_where()}, {job.target}: there is no such file, and no --config. Start from the "
            "directory that the job starts in, or name the YAML with --config."
        )
    for name in _DEFAULT.findall(job.source.read_text(encoding="utf-8")):
        for folder in ("configs", "."):
            path = Path(job.source.parent, folder, name)
            if path.is_file():
                return path
    raise PlanError(f"{_where()}, {job.source}: names no config. Name the YAML with --config.")


_SECTIONS = (
    *("cluster", "data", "env", "env.reward_model", "on_policy_distillation"),
    *(
        f"{role}{inner}"
        for role in _ROLES
        for inner in (
            *("", ".optimizer", ".precision_shim", ".generation", ".generation.colocated"),
            *(".dtensor_cfg", ".dtensor_cfg.lora_cfg", ".megatron_cfg", ".megatron_cfg.peft"),
            *(".megatron_cfg.fp8_cfg", ".megatron_cfg.optimizer", ".hf_config_overrides"),
            *(".megatron_cfg.distributed_data_parallel_config", ".reward_model_cfg"),
        )
    ),
)
"""The config's sections that the plan reads; an outer section precedes its inner sections."""


def _check_sections(config: Mapping[str, Any], unresolved: Sequence[str]) -> None:
    """Check that each section of the config has keys; the config may leave sections out.

    Args:
        config: the job's config.
        unresolved: the keys that cannot be resolved on this machine; a note of the plan names them.

    Raises:
        PlanError: a section has no keys, or the policy has no model.
    """
    for key in _SECTIONS:
        value: Any = config
        for word in key.split("."):
            value = None if value is None else value.get(word)
        if value is not None:
            mapping(value, key, _where())
    if not config["policy"].get("model_name") and "policy.model_name" not in unresolved:
        raise PlanError(
            f"{_where()}, policy.model_name={config['policy'].get('model_name')!r}: expected a "
            "model. Write its directory or name, or plan where the variables of the job are set."
        )


def _gpus(config: Mapping[str, Any]) -> int:
    """The number of GPUs that train, without GPUs that only serve rollout, reward or teachers."""
    cluster = config["cluster"]
    each, nodes = (
        number_of(cluster, f"cluster.{key}", _where()) for key in ("gpus_per_node", "num_nodes")
    )
    rewarding = _find_reward_model(config)
    if nodes == 1:
        each -= int(rewarding.get("gpus_per_node") or 0)
    else:
        nodes -= int(rewarding.get("num_nodes") or 0) + _count_teachers(config)
    generation = (config["policy"].get("generation") or {}).get("colocated") or {}
    if generation and not generation.get("enabled", True):
        theirs = generation.get("resources") or {}
        if nodes == 1 or not theirs.get("num_nodes"):
            each -= int(theirs.get("gpus_per_node") or 0)
        else:
            nodes -= int(theirs["num_nodes"])
    return each * nodes


def _find_reward_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The resources of a reward model that runs as an environment; empty if the job has none."""
    section = (config.get("env") or {}).get("reward_model") or {}
    data = config.get("data") or {}
    # In NeMo-RL 0.5 ``env_name`` is in ``data``, in later versions in sections of ``data``. NeMo-RL
    # 0.4 has ``enabled`` in the reward model's section instead of ``env_name``.
    places = [data, *(data.get(name) for name in ("train", "validation", "default"))]
    names = [place.get("env_name") for place in places if isinstance(place, Mapping)]
    used = section.get("enabled") is True or "reward_model" in names
    return (section.get("resources") or {}) if used else {}


def _count_teachers(config: Mapping[str, Any]) -> int:
    """The number of nodes that are reserved for the teachers of on-policy distillation."""
    section = config.get("on_policy_distillation") or {}
    apart = section.get("non_colocated_teachers") or {}
    if not (section.get("enabled") and apart.get("enabled")):
        return 0
    default, own = apart.get("default_teacher_cfg") or {}, apart.get("teacher_overrides") or {}
    teachers: list[tuple[str, int]] = []
    for alias, name in (section.get("teacher_model_by_agent_name") or {}).items():
        if section.get("deduplicate_shared_teacher_checkpoints", True) and name in dict(teachers):
            continue
        teachers.append((name, int({**default, **(own.get(alias) or {})}.get("num_nodes", 1))))
    return sum(nodes for _, nodes in teachers)


def _models(job: Job, config: Mapping[str, Any], world: int) -> Iterator[Plannable]:
    teachers = config.get("teachers") or []
    for key, subject in _ROLES.items():
        section = config.get(key)
        if isinstance(section, Mapping) and section.get("model_name"):
            if teachers:  # without a rollout, a job with teachers never offloads its student
                section = {**section, "generation": None}
            yield _model(job, section, key, subject, world)
    for place, section in enumerate(teachers):
        if isinstance(section, Mapping) and section.get("model_name"):
            yield _model(job, section, f"teachers.{place}", f"teacher_{place}", world)


def _model(job: Job, section: Mapping[str, Any], key: str, subject: str, world: int) -> Plannable:
    on_megatron = bool((section.get("megatron_cfg") or {}).get("enabled"))
    if on_megatron:
        return _on_megatron(job, section, key, subject, world)
    cfg = section.get("dtensor_cfg") or {}
    if not cfg.get("enabled"):
        raise PlanError(
            f"{_where()}, {key}: neither megatron_cfg.enabled nor dtensor_cfg.enabled is true. "
            "Write one of them."
        )
    return _on_dtensor(job, section, key, subject, world)


def _refuse_adapters(key: str, switch: object) -> None:
    if switch:
        raise no_adapters(f"{_where()}, {key}.enabled=true", f"{key}.enabled=false")


def _on_megatron(
    job: Job, section: Mapping[str, Any], key: str, subject: str, world: int
) -> Plannable:
    cfg = section["megatron_cfg"]
    where = f"{key}.megatron_cfg"
    _refuse_adapters(f"{where}.peft", (cfg.get("peft") or {}).get("enabled"))
    trains = not subject.startswith("teacher")
    ddp = cfg.get("distributed_data_parallel_config") or {}
    fsdp = bool(ddp.get("use_custom_fsdp") or ddp.get("use_megatron_fsdp"))
    if fsdp:
        raise PlanError(
            f"{_where()}, {where}.distributed_data_parallel_config: Megatron-FSDP is not planned. "
            "Plan the job without it."
        )
    complete = {**cfg, "optimizer": cfg.get("optimizer") or {}}
    complete["distributed_data_parallel_config"] = ddp
    names = ("precision", "megatron_cfg.pipeline_dtype")
    illegal = [*legality.names(section, key, subject, names)]
    if illegal:
        return Illegal(subject, tuple(illegal))
    illegal += legality.of_megatron(section, key, subject)
    wishes = megatron.read_wishes(
        {**section, "megatron_cfg": complete}, subject, megatron_fsdp=fsdp, trains=trains
    )
    frozen = is_router if cfg.get("freeze_moe_router") else (lambda name: False)
    return MegatronModel(
        wishes,
        job.model(section["model_name"], section.get("hf_config_overrides")),
        read_sizes(
            world,
            "cluster.gpus_per_node x cluster.num_nodes",
            where,
            cfg,
            sequence_parallel=bool(cfg.get("sequence_parallel")),
        ),
        wishes.declared or torch.bfloat16,
        bucket_in_fp32=bool(ddp.get("grad_reduce_in_fp32", False)),
        frozen=frozen,
        value_head=subject == "value",
        key=f"{where}.optimizer.{{}}",
        bucket_key=f"{where}.distributed_data_parallel_config.grad_reduce_in_fp32",
        prefix="++",
        parked=_find_parked(section, key),
        illegal=tuple(illegal) if trains else (),
    )


def _find_parked(section: Mapping[str, Any], key: str) -> dict[str, tuple[str, ...]]:
    """The components that NeMo-RL offloads while the rollout or another model runs."""
    shared = (section.get("generation") or {}).get("colocated") or {}
    if key.startswith("teachers."):
        return {key: WEIGHTS + STATES}
    return (
        {f"{key}.generation.colocated.enabled": WEIGHTS + STATES} if shared.get("enabled") else {}
    )


def _on_dtensor(
    job: Job, section: Mapping[str, Any], key: str, subject: str, world: int
) -> Plannable:
    cfg = section["dtensor_cfg"]
    _refuse_adapters(f"{key}.dtensor_cfg.lora_cfg", (cfg.get("lora_cfg") or {}).get("enabled"))
    trains = not subject.startswith("teacher")
    illegal = tuple(legality.names(section, key, subject, ("precision",)))
    illegal += tuple(legality.offload(section, key, subject, world))
    if trains:
        illegal += tuple(legality.torch_optimizer(section, key, subject))
    if illegal:
        return Illegal(subject, illegal)
    precision = legality.DTYPES[section["precision"]]
    scaled: tuple[Decided, ...] = ()
    if trains:
        scaled = scaling(
            job,
            name_of(precision),
            dtensor.group_of(subject, second=bool(cfg.get("_v2"))),
            dtensor.scaled_because(subject),
            configured=partial(dtensor.read_section, section, subject),
        )
    name = str((section.get("optimizer") or {}).get("name") or "torch.optim.AdamW")
    return ShardedModel(
        subject,
        job.model(section["model_name"], section.get("hf_config_overrides")),
        world,
        "fp32",  # NeMo-RL loads weights in float32, and computes in policy.precision
        tensor=number_of(cfg, f"{key}.dtensor_cfg.tensor_parallel_size", _where()),
        context=number_of(cfg, f"{key}.dtensor_cfg.context_parallel_size", _where()),
        replicas=number_of(cfg, f"{key}.dtensor_cfg.dp_replicate_size", _where()),
        compute=name_of(precision),
        optimizer=name if trains else "",
        decisions=scaled,
        offload=bool(cfg.get("cpu_offload")),
        value_head=subject == "value"
        or bool((section.get("reward_model_cfg") or {}).get("enabled")),
        keys={
            "world": "cluster.gpus_per_node x cluster.num_nodes",
            "tensor": f"{key}.dtensor_cfg.tensor_parallel_size",
            "context": f"{key}.dtensor_cfg.context_parallel_size",
            "replicas": f"{key}.dtensor_cfg.dp_replicate_size",
            "shards": "cluster.gpus_per_node x cluster.num_nodes",
            "optimizer": f"{key}.optimizer.name",
        },
        parked={} if cfg.get("cpu_offload") else _find_parked(section, key),
    )
