"""Plan verl's jobs from their Hydra YAML and overrides.

Hydra composes the config that the entry point's decorator names, without an import of verl.
Plan and worker read the config with ``verl.config``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from precision_shim.adapting import look
from precision_shim.errors import DtypeError, PlanError
from precision_shim.precision.dtypes import name_of
from precision_shim.precision.findings import Problem
from precision_shim_adapters.common.omegaconf_values import tell_unresolved
from precision_shim_adapters.megatron import DISPATCH, GROUP, PRECISION_AWARE, RequestedConfig
from precision_shim_adapters.megatron.installed import FSDP_GRADS
from precision_shim_adapters.megatron.policy.legality import GATHERS
from precision_shim_adapters.megatron.policy.requested import COERCION
from precision_shim_adapters.verl import config as verls
from precision_shim_adapters.verl.config import PPO as _SHARED
from precision_shim_adapters.verl.config import ModelConfig
from precision_shim_adapters.verl.rollout import driver, dtypes, weight_sync
from precision_shim_adapters.verl.training import fsdp

from ..command import Job
from ..megatron.model import MegatronModel, misplaced, quantized_in
from ..megatron.sizes import read_sizes
from ..record import Decided
from ..request import Plannable, Request, read_request
from ..rollout import listed, predict_sides
from ..shapes import Model, with_peft
from ..torch_optimizer import ShardedModel, learning_rate, scaling
from ..values import mapping, number_of
from . import sections
from .composing import compose
from .sections import inner

_BETAS = [0.9, 0.999]
"""verl's default of ``optim.betas``, which only torch's optimizers get."""
_FSDPS_SIZES = {"shards": "fsdp_size", "context": "ulysses_sequence_parallel_size"}
_SIZES = {
    "automodel": {"tensor": "tp_size", "context": "cp_size", "replicas": "dp_replicate_size"},
    "veomni": {"shards": "fsdp_size", "context": "ulysses_parallel_size"},
    "torchtitan": {
        "shards": "data_parallel_shard_size",
        "tensor": "tensor_parallel_size",
        "context": "context_parallel_size",
    },
}
"""Maps an engine to its keys for the sizes of a ``ShardedModel``."""
_ADDED = "++"
"""Hydra's prefix that adds or overrides a key."""

_where = sections.where


def plan_job(job: Job) -> Request:
    """Read a command line that launches a verl job.

    Raises:
        PlanError: the config or a model cannot be read.
    """
    unresolved: list[str] = []
    added: list[str] = []
    config = compose(job, unresolved, added)
    problems: list[Problem] = []
    notes: list[str] = []
    if _SHARED in config:
        gpus = _gpus(config)
        mapping(inner(config, _SHARED).get("actor"), f"{_SHARED}.actor", _where())
        every = verls.of_ppo(config, inner)
        found = [one for one in every if not one.unbuilt]
        problems, notes = _both_sides(job, config)
        for one in every:
            notes += sections.tell_not_built(one)
    elif "engine" in config and "optim" in config:
        gpus = _gpus(config)
        if job.processes is not None:  # torchrun starts the job
            gpus = job.processes, "--nproc-per-node x --nnodes"
        found = [verls.of_tuning(config, inner)]
    else:
        raise PlanError(
            f"{_where()}, {job.target}: its config trains no model: expected actor_rollout_ref, or "
            "model, engine and optim. Plan the job that trains."
        )
    readers = ((one.subject, partial(_model, job, one, gpus)) for one in found)
    notes += [*_not_judged(found, added), *tell_unresolved(unresolved)]
    return read_request(job, gpus[0], readers, problems, notes, rollout=_SHARED in config)


def _not_judged(found: Sequence[ModelConfig], added: Sequence[str]) -> Iterator[str]:
    """Yield a note on each precision at a key that no rule covers, and that verl's config lacks."""
    judged = [f"{_SHARED}.{verls.ROLLOUT}.engine_kwargs."]
    for one in found:
        judged += [f"{key}." for key in (one.engine_key, one.optim_key)]
        judged.append(f"{one.model_key}.override_config.")
        judged += [f"{fault.key}." for fault in sections.unknown(one, dispatches=True)]
    for word in added:
        key = word.partition("=")[0]
        section, _, name = key.rpartition(".")
        if not key.startswith(tuple(judged)) and section not in [one.role_key for one in found]:
            yield f"{word}: verl's config has no such key. Look for {name} in the job's code"


def _both_sides(job: Job, config: Mapping[str, Any]) -> tuple[list[Problem], list[str]]:
    """Predict the report of ``driver.compare_engines`` about actor, reference and rollout."""
    try:
        sides = dtypes.read_sides(config, job.in_force)
        if sides is None:
            return [], []
        findings, _ = predict_sides(job, sides, driver.GROUP)
        if sides.trainer is not None:
            findings += weight_sync.judge_delta(config[_SHARED])
    except DtypeError as error:
        return [Problem.of(error, "", error.key)], []
    return listed(findings)


def _gpus(config: Mapping[str, Any]) -> tuple[int, str]:
    trainer = inner(config, "trainer")
    world = _number(trainer, "trainer.n_gpus_per_node") * _number(trainer, "trainer.nnodes")
    return world, "trainer.n_gpus_per_node x trainer.nnodes"


def _number(config: Mapping[str, Any], key: str, default: int = 1) -> int:
    return number_of(config, key, _where(), default)


def _model(job: Job, section: ModelConfig, gpus: tuple[int, str]) -> Plannable:
    if section.strategy not in verls.ENGINES:
        raise PlanError(
            f"{_where()}, {section.engine_key}: strategy={section.strategy!r}: planned are "
            f"{', '.join(verls.ENGINES)}. Plan the job with one of these."
        )
    own, place, unread = section.model, section.model_key, tuple(_not_adapted(section))
    written = inner(own, f"{place}.override_config")
    others = ("moe_config", "attn_implementation", "model_config")
    overrides = written.get("model_config") or {
        key: value for key, value in written.items() if key not in others
    }
    shapes = job.model(
        own.get("hf_config_path") or own.get("path"),
        {key: value for key, value in overrides.items() if value is not None},
        partial(with_peft, section.lora) if section.lora and section.sharded else None,
    )
    acts = job.in_force(DISPATCH, GROUP)
    any_key = "verl.experimental.vla." in job.target  # verl 0.7.1: its own workers
    illegal = () if any_key else tuple(sections.unknown(section, dispatches=acts))
    illegal = (*illegal, *_not_adaptable(section))
    if section.strategy == "megatron":
        spelled = tuple(sections.check_megatron(section))
        alone = (*sections.unknown(section, dispatches=False), *spelled)
        illegal += () if job.in_force(COERCION, GROUP) else spelled
        made = _on_megatron(section, shapes, gpus, illegal)
        return replace(made, alone=alone, notes=(*made.notes, *unread))
    sharded = _sharded(job, section, shapes, gpus, illegal)
    return replace(sharded, notes=(*sharded.notes, *unread))


def _not_adaptable(section: ModelConfig) -> Iterator[Problem]:
    """Yield a problem if the worker cannot put LoRA adapters into the model."""
    key = f"{section.engine_key}.vanilla_mbridge"
    if section.lora and section.sharded and section.subject == "critic":
        rank = f"{section.model_key}.lora_rank"
        fault = "verl asks peft for adapters of a language model, and peft refuses a value model"
        yield Problem("lora", section.subject, rank, fault, f"Write {rank}=0.")
    if section.lora and not section.sharded and not _bridges(section):
        fault = "verl makes LoRA adapters on Megatron with Megatron-Bridge only"
        remedy = f"Write {section.engine_key}.use_mbridge=True and {key}=False."
        yield Problem("lora", section.subject, key, fault, remedy)


def _not_adapted(section: ModelConfig) -> Iterator[str]:
    """Yield a note on each key of LoRA adapters that the model's engine does not read."""
    place = section.model_key
    sections = {"lora_rank": section.model, "lora.rank": inner(section.model, f"{place}.lora")}
    for name, keys in sections.items():
        key = f"{place}.{name}"
        if _number(keys, key, 0) and not section.lora:
            yield (
                f"{key}: {_where()}'s {section.strategy} engine does not read it, and trains the "
                "whole model"
            )


def _on_megatron(
    section: ModelConfig, model: Model, gpus: tuple[int, str], illegal: tuple[Problem, ...]
) -> MegatronModel:
    engine, optim = section.engine, section.optim
    fields = f"{section.optim_key}.override_optimizer_config"
    buckets = f"{section.engine_key}.override_ddp_config"
    layers_key = f"{section.engine_key}.override_transformer_config"
    layers = inner(engine, layers_key)
    ddp = inner(engine, buckets)
    inner(optim, fields)
    requested = verls.of_configs(
        engine,
        optim,
        subject=section.subject,
        declared=section.declared,
        trains=section.trains,
        place=section.optim_key,
    )
    dtype = requested.declared or torch.bfloat16
    betas, notes = list(optim.get("betas") or _BETAS), []
    if betas != _BETAS:
        notes.append(
            f"{section.optim_key}.betas={betas}: verl does not pass it to Megatron, whose beta2 "
            f"matters for a bf16 exp_avg_sq. Write ++{fields}.adam_beta1 and .adam_beta2"
        )
    return MegatronModel(
        requested,
        model,
        read_sizes(*gpus, section.engine_key, engine, "override_transformer_config"),
        dtype,
        bucket_in_fp32=_bucket(section, requested),
        value_head=section.subject == "critic",
        key=f"{fields}.{{}}",
        bucket_key=f"{buckets}.grad_reduce_in_fp32",
        buckets=ddp,
        prefix=_ADDED,
        illegal=(
            *illegal,
            *_flags(section, layers, dtype),
            *misplaced(
                section.subject, layers, f"{layers_key}.{{}}", f"{buckets}.{{}}", f"{fields}.{{}}"
            ),
        ),
        quantized=quantized_in(layers),
        notes=tuple(notes),
        layers=layers,
        layers_key=f"{layers_key}.{{}}",
        gathers=any(ddp.get(name) for name in GATHERS),
        unscaled="the first fp16 overflow ends the job with NotImplementedError",
        fsdp=str(ddp.get(FSDP_GRADS) or "") if engine.get("use_megatron_fsdp") else None,
        lora=section.lora,
    )


def _flags(
    section: ModelConfig, layers: Mapping[str, Any], dtype: torch.dtype
) -> Iterator[Problem]:
    """Yield a problem if the model's config gets the flag of another dtype than the engine's."""
    for flag, other in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if layers.get(flag) and dtype is not other:
            key, owner = f"override_transformer_config.{flag}", f"{section.engine_key}.dtype"
            fault = f"{flag}={layers[flag]} beside {owner}={name_of(dtype)}: Megatron takes one"
            remedy = f"Leave it out, or write {owner}={str(other).removeprefix('torch.')}."
            yield Problem("flags", section.subject, f"{section.engine_key}.{key}", fault, remedy)


def _bucket(section: ModelConfig, requested: RequestedConfig) -> bool:
    """verl's value of ``grad_reduce_in_fp32`` if the user wrote none.

    verl's ``get_model`` and mbridge set ``grad_reduce_in_fp32`` to True, Megatron-Bridge to False.
    In verl 0.9 and later, the engine derives ``grad_reduce_in_fp32`` from the optimizer's fields.
    """
    aware = requested.opt_in.get(PRECISION_AWARE)
    low = requested.opt_in.get("main_grads_dtype", torch.float32) is not torch.float32
    resolver = look(f"{verls.MEGATRON}._resolve_override_ddp_config")
    if resolver.found and aware and low:
        return False
    if resolver.found and "use_low_precision_main_grads" in resolver.names:
        return True
    return not _bridges(section)


def _bridges(section: ModelConfig) -> bool:
    """Whether Megatron-Bridge builds the model."""
    engine = section.engine
    return bool(engine.get("use_mbridge")) and engine.get("vanilla_mbridge") is False


def _sharded(
    job: Job,
    section: ModelConfig,
    model: Model,
    gpus: tuple[int, str],
    illegal: tuple[Problem, ...],
) -> ShardedModel:
    engine, optim, trains, place = section.engine, section.optim, section.trains, section.engine_key
    for degree in ("expert_parallel_size", "ep_size", "pipeline_parallel_size", "pp_size"):
        if (engine.get(degree) or 1) != 1:
            raise PlanError(
                f"{_where()}, {place}.{degree}={engine[degree]}: planned are data, tensor and "
                f"context parallelism of its {section.strategy} engine. Set {place}.{degree}=1."
            )
    stored, dtype, reduce = section.dtypes()
    if dtype is None:
        key = f"{place}.{section.kind.computes}"
        raise PlanError(
            f"{_where()}: {key}={section.get(section.kind.computes)!r} is no dtype, and FSDP "
            f"Turbo's default is not known here. Set {key}."
        )
    if dtype is torch.float16:
        section.check_fp16()
    overrides = f"{section.optim_key}.override_optimizer_config"
    options = inner(optim, overrides)
    keys = {"world": gpus[1], "optimizer": f"{section.optim_key}.optimizer"}
    keys["dtype"] = section.in_fp32
    name, module = "", ""
    scaled: tuple[Decided, ...] = ()
    notes: list[str] = []
    if trains:
        because = fsdp.scaled_because(section)
        legacy = section.autocasts and verls.is_fp16(engine.get("dtype"))
        scaled = scaling(
            job,
            name_of(dtype),
            section.group,
            because,
            framework_default=fsdp.VERLS_SCALER,
            scales_itself=because == fsdp.OWN_SCALER or legacy,
        )
        name = str(optim.get("optimizer") or optim.get("name") or "AdamW")
        module = str(optim.get("optimizer_impl") or "torch.optim") + "."
        if module == "torch.optim." and section.sharded:
            keys["options"] = overrides
        if section.has_model_dtype:
            notes.append(section.unscaled(dtype))
        if section.refusal:
            notes.append(f"dtype=float16 is not what it trains in, but bfloat16: {section.refusal}")
    trained = section.lora_dtype if section.lora else stored
    if scaled and trained is torch.float16:
        sections.check_moments(section, name)
    sizes: dict[str, Any] = {}
    for size, key in _SIZES.get(section.strategy, _FSDPS_SIZES).items():
        keys[size] = f"{place}.{key}"
        sizes[size] = _number(engine, keys[size], -1 if size == "shards" else 1)
    sequence = _number(section.role, f"{section.role_key}.ulysses_sequence_parallel_size")
    if sequence > 1:  # the model's Ulysses size overrides the engine's
        sizes["context"] = sequence
    # verl always keeps a forward-only model in the host's memory, even without ``param_offload``.
    forward_only = engine.get("forward_only", True) or engine.get("param_offload")
    on_host = engine.get("offload_policy") if trains else forward_only
    return ShardedModel(
        section.subject,
        model,
        gpus[0],
        name_of(stored),
        **sizes,
        compute=name_of(dtype),
        reduce=name_of(reduce) if reduce else "",
        optimizer=module + name,
        options=options,
        adapters=name_of(trained),
        lr=learning_rate({**optim, **options}),
        decisions=scaled,
        offload=bool(on_host) and not (trains and section.strategy == "fsdp"),
        value_head=section.subject == "critic",
        keys=keys,
        wrote=(*section.written(_ADDED), *sections.overridden(section)),
        illegal=illegal,
        notes=tuple(filter(None, notes)),
    )
