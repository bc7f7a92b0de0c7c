"""Plan NeMo-RL's jobs from a YAML file, the YAML files that it inherits from, and overrides.

NeMo-RL's loader, which needs hydra but not torch, reads the YAML files. As in a worker,
``nemo_rl.megatron`` reads the optimizer's ``RequestedConfig`` from the config.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from precision_shim.adapting import look, version_of, versioned
from precision_shim.errors import DtypeError, PlanError
from precision_shim.precision.dtypes import name_of, parse_dtype
from precision_shim.precision.findings import Problem
from precision_shim.precision.releases import release
from precision_shim_adapters.common.omegaconf_values import plain, tell_unresolved
from precision_shim_adapters.megatron import PRECISION_AWARE
from precision_shim_adapters.megatron.policy.bucket import SUMS
from precision_shim_adapters.megatron.policy.legality import GATHER
from precision_shim_adapters.nemo_rl import config as reader
from precision_shim_adapters.nemo_rl import rollout
from precision_shim_adapters.nemo_rl.config import DTYPES, FRAMEWORK
from precision_shim_adapters.nemo_rl.training.workers import POLICIES, SETUP, group_of

from .command import Job
from .megatron.model import MegatronModel, quantized_in
from .megatron.sizes import read_sizes
from .record import Decided
from .request import Plannable, Request, read_request
from .rollout import listed, predict_sides
from .torch_optimizer import ShardedModel, learning_rate, scaling
from .values import not_built, number_of, said, section_of

_ROLES = ("policy", "value", "teacher")
_CHECKS = (
    f"{SETUP}:_validate_dtype_config",
    *(f"{POLICIES[1]}:MegatronPolicyWorker{end}.__init__" for end in ("", "Impl")),
)
"""NeMo-RL's functions that check the optimizer's flags, in NeMo-RL 0.5 and later."""
_FLAGS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_WORLD = "cluster.gpus_per_node x cluster.num_nodes"
_where = cache(partial(versioned, FRAMEWORK))
_DEFAULT = re.compile(r"[\"']([\w./-]+\.ya?ml)[\"']")


def plan_job(job: Job) -> Request:
    """Read a command line that launches a NeMo-RL job.

    Raises:
        PlanError: the config or a model cannot be read.
    """
    unresolved: list[str] = []
    config = load(job, unresolved)
    if not _of(config, "policy") or not config.get("cluster"):
        raise PlanError(
            f"{_where()}, {job.target}: its config trains no model: expected policy and cluster. "
            "Plan the job that trains."
        )
    world = _gpus(config)
    problems, notes = _both_sides(job, config)
    for key in _ROLES[1:]:
        section = _of(config, key)
        if not section.get("model_name"):
            notes += not_built(key, f"{key}.model_name is not set", reader.written(section, key))
    rest = {key: config[key] for key in config if key not in (*_ROLES, "teachers")}
    for keys, value in reader.unread(rest, anywhere=True):
        notes.append(f"{'.'.join(keys)}={value}: NeMo-RL reads no key of this name")
    notes += tell_unresolved(unresolved)
    rolls_out = bool(_of(config["policy"], "policy.generation"))
    readers = _models(job, config, world)
    return read_request(job, world, readers, problems, notes, rollout=rolls_out)


def _both_sides(job: Job, config: Mapping[str, Any]) -> tuple[list[Problem], list[str]]:
    """Predict the driver's report on the dtypes of policy, rollout and teacher."""
    try:
        generation = _of(config["policy"], "policy.generation")
        if generation:
            rollout.coerce_names(generation)
        sides = rollout.read_sides(config)
    except DtypeError as error:
        return [Problem.of(error, "rollout", error.key)], []
    return listed(predict_sides(job, sides, rollout.GROUP)[0]) if sides else ([], [])


def _of(section: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return section_of(section, key, _where())


def load(job: Job, unresolved: list[str] | None = None) -> dict[str, Any]:
    """Load a job's config, and apply its overrides; ``unresolved``: see ``plain``.

    Raises:
        PlanError: NeMo-RL cannot load the config.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", default="")
    named, overrides = parser.parse_known_args(list(job.arguments))
    overrides = [word for word in overrides if not word.startswith("--")]  # of the job's script
    path = job.launch.folder / named.config if named.config else _default(job)
    try:
        from nemo_rl.utils import config as loader
        from omegaconf import OmegaConf

        register = getattr(loader, "register_omegaconf_resolvers", None)
        if register is not None:
            register()
        else:  # up to NeMo-RL 0.5 each example registers the resolver ``mul``
            OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)
        made = loader.load_config(path)
        if overrides:
            made = loader.parse_hydra_overrides(made, overrides)
        config: dict[str, Any] = plain(made, unresolved=unresolved)
    except Exception as error:  # reading files, YAML, hydra and omegaconf raise various errors
        raise PlanError(
            f"{_where()}, {path}: {said(error)}. Correct the override or the file, or plan in the "
            "environment of the job."
        ) from error
    return config


def _default(job: Job) -> Path:
    """The path of an example's default config file, found in the example's source."""
    source = Path(job.source or job.target)
    for name in _DEFAULT.findall(source.read_text(encoding="utf-8")):
        for path in (Path(source.parent, folder, name) for folder in ("configs", ".")):
            if path.is_file():
                return path
    raise PlanError(f"{_where()}, {source}: names no config. Name the YAML with --config.")


def _gpus(config: Mapping[str, Any]) -> int:
    """The number of GPUs that train, without GPUs that only serve rollout, reward or teachers."""
    cluster = _of(config, "cluster")
    each = number_of(cluster, "cluster.gpus_per_node", _where())
    nodes = number_of(cluster, "cluster.num_nodes", _where())
    rewarding = _find_reward_model(config)
    if nodes == 1:
        each -= int(rewarding.get("gpus_per_node") or 0)
    else:
        nodes -= int(rewarding.get("num_nodes") or 0) + _count_teachers(config)
    key = "policy.generation.colocated"
    colocated = _of(_of(config["policy"], "policy.generation"), key)
    if not colocated.get("enabled", True):
        theirs = _of(colocated, f"{key}.resources")
        if nodes == 1 or not theirs.get("num_nodes"):
            each -= int(theirs.get("gpus_per_node") or 0)
        else:
            nodes -= int(theirs["num_nodes"])
    return each * nodes


def _find_reward_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The resources of a reward model that runs as an environment; empty if the job has none."""
    section, data = _of(_of(config, "env"), "env.reward_model"), _of(config, "data")
    # In NeMo-RL 0.5 ``env_name`` is in ``data``, in later versions in sections of ``data``. NeMo-RL
    # 0.4 has ``enabled`` in the reward model's section instead of ``env_name``.
    places = [data, *(data.get(name) for name in ("train", "validation", "default"))]
    names = [place.get("env_name") for place in places if isinstance(place, Mapping)]
    used = section.get("enabled") is True or "reward_model" in names
    return _of(section, "env.reward_model.resources") if used else {}


def _count_teachers(config: Mapping[str, Any]) -> int:
    """The number of nodes that are reserved for the teachers of on-policy distillation."""
    section = _of(config, "on_policy_distillation")
    apart = _of(section, "on_policy_distillation.non_colocated_teachers")
    if not (section.get("enabled") and apart.get("enabled")):
        return 0
    default, own = apart.get("default_teacher_cfg") or {}, apart.get("teacher_overrides") or {}
    shares = section.get("deduplicate_shared_teacher_checkpoints", True)
    nodes: dict[str, int] = {}
    for alias, name in (section.get("teacher_model_by_agent_name") or {}).items():
        teacher = name if shares else alias
        asked = {**default, **(own.get(alias) or {})}
        nodes.setdefault(teacher, int(asked.get("num_nodes", 1)))
    return sum(nodes.values())


def _models(
    job: Job, config: Mapping[str, Any], world: int
) -> Iterator[tuple[str, Callable[[], Plannable]]]:
    named = {key: (key, _of(config, key)) for key in _ROLES}
    for place, section in enumerate(config.get("teachers") or []):
        named[f"teacher_{place}"] = f"teachers.{place}", section
    for subject, (key, section) in named.items():
        if subject == "policy" or section.get("model_name"):
            yield subject, partial(_model, job, section, key, subject, world)


def _model(job: Job, section: Mapping[str, Any], key: str, subject: str, world: int) -> Plannable:
    _check_names(section, key)
    if _of(section, f"{key}.megatron_cfg").get("enabled"):
        return _on_megatron(job, section, key, subject, world)
    if not _of(section, f"{key}.dtensor_cfg").get("enabled"):
        raise PlanError(
            f"{_where()}, {key}: neither megatron_cfg.enabled nor dtensor_cfg.enabled is true. "
            "Write one of them."
        )
    return _on_dtensor(job, section, key, subject, world)


def _check_names(section: Mapping[str, Any], key: str) -> None:
    """Raise ``DtypeError`` if a model's dtype key has none of NeMo-RL's dtype names."""
    megatron_cfg = _of(section, f"{key}.megatron_cfg")
    written = {"precision": section.get("precision")}
    if megatron_cfg.get("enabled") and "pipeline_dtype" in megatron_cfg:
        written["megatron_cfg.pipeline_dtype"] = megatron_cfg["pipeline_dtype"]
    for field, value in written.items():
        if not isinstance(value, str) or value not in DTYPES:
            raise DtypeError(
                f"{_where()}: {key}.{field}={value!r} names no dtype that NeMo-RL takes; allowed: "
                f"{', '.join(DTYPES)}, spelled so. Correct {key}.{field}.",
                key=f"{key}.{field}",
            )


def _flags(
    optimizer: Mapping[str, Any], precision: str, key: str, subject: str
) -> Iterator[Problem]:
    """Yield a problem for each optimizer field that NeMo-RL itself refuses."""
    place, part = f"{key}.megatron_cfg.optimizer", "optimizer_offload_fraction"
    if optimizer.get("optimizer_cpu_offload") and optimizer.get(part) != 1.0:
        fault = f"{_where()}: {part}={optimizer.get(part)}: it takes 1.0 with optimizer_cpu_offload"
        remedy = "Write 1.0, or optimizer_cpu_offload: false."
        yield Problem("offload", subject, f"{place}.{part}", fault, remedy)
    if not any(PRECISION_AWARE in look(function).names for function in _CHECKS):
        return  # NeMo-RL 0.4 checks no flags
    needed = _FLAGS.get(DTYPES[precision])
    written = [flag for flag in _FLAGS.values() if optimizer.get(flag)]
    wrong = written if needed is None else written[1:]
    if needed is not None and optimizer.get(PRECISION_AWARE) and needed not in written:
        wrong = [needed]
    values = f"bf16={'bf16' in written}, fp16={'fp16' in written}".lower()
    fault = f"{_where()}: {values} beside {key}.precision={precision}"
    pairs = " and ".join(f"{place}.{one}={one == needed}" for one in _FLAGS.values())
    remedy = f"Write {pairs.lower()}."
    for flag in wrong:
        yield Problem("flags", subject, f"{place}.{flag}", fault, remedy)


def _not_adapted(where: str, subject: str) -> Problem:
    fault = "NeMo-RL makes LoRA adapters only with Automodel"
    key, remedy = f"{where}.lora_cfg.enabled", f"Write {where}._v2=true."
    return Problem("lora", subject, key, fault, remedy)


def _adapt(lora: Mapping[str, Any], model: Any) -> Any:
    """Apply Automodel's LoRA to a model, as NeMo-RL does."""
    from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules

    apply_lora_to_linear_modules(model, PeftConfig.from_dict(lora))
    return model


def _on_megatron(
    job: Job, section: Mapping[str, Any], key: str, subject: str, world: int
) -> Plannable:
    where = f"{key}.megatron_cfg"
    cfg = _of(section, where)
    trains = not subject.startswith("teacher")
    lora = reader.read_lora(section, "megatron_cfg.peft") if trains else {}
    ddp = f"{where}.distributed_data_parallel_config"
    buckets = _of(cfg, ddp)
    if buckets.get("use_custom_fsdp") or buckets.get("use_megatron_fsdp"):
        raise PlanError(
            f"{_where()}, {ddp}: Megatron-FSDP is not planned. Plan the job without it."
        )
    fp8, optimizer = _of(cfg, f"{where}.fp8_cfg"), _of(cfg, f"{where}.optimizer")
    requested = reader.read_requested(section, subject, megatron_fsdp=False, trains=trains)
    return MegatronModel(
        requested,
        job.model(section.get("model_name"), section.get("hf_config_overrides")),
        read_sizes(world, _WORLD, where, cfg),
        requested.declared or torch.bfloat16,
        bucket_in_fp32=bool(buckets.get("grad_reduce_in_fp32", False)),
        frozen_routers=bool(cfg.get("freeze_moe_router")),
        value_head=subject == "value",
        key=f"{where}.optimizer.{{}}",
        bucket_key=f"{ddp}.grad_reduce_in_fp32",
        buckets={name: value for name, value in buckets.items() if name != SUMS},  # not passed on
        prefix="++",
        format=reader.format_of(section, key),
        quantized=quantized_in(fp8) if fp8.get("enabled") else "",
        layers={name: cfg.get(name) for name in ("moe_router_dtype", "pipeline_dtype")},
        layers_key=f"{where}.{{}}",
        gathers=GATHER in look(f"{SETUP}:_create_megatron_config").names,
        illegal=tuple(_flags(optimizer, section["precision"], key, subject)) if trains else (),
        unscaled="the first fp16 overflow ends the job, by check_for_nan_in_grad",
        lora=lora,
    )


def _on_dtensor(
    job: Job, section: Mapping[str, Any], key: str, subject: str, world: int
) -> Plannable:
    where = f"{key}.dtensor_cfg"
    cfg = _of(section, where)
    trains = not subject.startswith("teacher")
    lora = reader.read_lora(section, "dtensor_cfg.lora_cfg") if trains else {}
    precision = name_of(reader.computed_in(section, key)[0] or torch.float32)
    scaled: tuple[Decided, ...] = ()
    if trains:
        scaled = scaling(
            job,
            precision,
            group_of(subject, second=bool(cfg.get("_v2"))),
            reader.scaled_because(subject),
            configured=partial(reader.read_section, section, subject),
        )
    optimizer = _of(section, f"{key}.optimizer")
    name = str(optimizer.get("name") or "torch.optim.AdamW")
    options = _of(optimizer, f"{key}.optimizer.kwargs")
    stored = None
    # In releases before these, the worker's float32, or the checkpoint's dtype, wins.
    if release(version_of("nemo-rl", ("nemo_rl",)) or "") >= ((0, 7) if cfg.get("_v2") else (0, 6)):
        stored = parse_dtype(str(_of(section, f"{key}.hf_config_overrides").get("dtype")))
    reward = _of(section, f"{key}.reward_model_cfg")
    keys = {
        "tensor": f"{where}.tensor_parallel_size",
        "context": f"{where}.context_parallel_size",
        "replicas": f"{where}.dp_replicate_size",
    }
    sizes: dict[str, Any] = {size: number_of(cfg, at, _where()) for size, at in keys.items()}
    keys.update(world=_WORLD, optimizer=f"{key}.optimizer.name", options=f"{key}.optimizer.kwargs")
    keys["dtype"] = f"{key}.hf_config_overrides.dtype=float32"
    return ShardedModel(
        subject,
        job.model(
            section.get("model_name"),
            section.get("hf_config_overrides"),
            partial(_adapt, lora) if lora else None,
        ),
        world,
        # NeMo-RL loads weights in float32 unless this key has a dtype; it computes in precision.
        name_of(stored or torch.float32),
        **sizes,
        compute=precision,
        optimizer=name if trains else "",
        options=options,
        adapters="fp32" if lora else "",  # whatever lora_dtype says
        lr=learning_rate(options),
        decisions=scaled,
        offload=bool(cfg.get("cpu_offload")),
        value_head=subject == "value" or bool(reward.get("enabled")),
        wrote=tuple(reader.written(section, key)),
        illegal=() if cfg.get("_v2") or not lora else (_not_adapted(where, subject),),
        keys=keys,
    )
