"""Plan verl's jobs from their Hydra YAML and overrides.

Hydra composes the config that the entry point's decorator names, without an import of verl.
Plan and worker read optimizer settings with ``megatron.of_configs``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from precision_shim.adapting import look, versioned
from precision_shim.errors import DtypeError, PlanError
from precision_shim.precision.dtypes import name_of, parse_dtype
from precision_shim.precision.findings import Problem
from precision_shim_adapters.common.omegaconf_values import tell_unresolved
from precision_shim_adapters.megatron import DISPATCH, GROUP, PRECISION_AWARE, RequestedConfig
from precision_shim_adapters.megatron.installed import FSDP_GRADS
from precision_shim_adapters.megatron.policy.legality import GATHERS
from precision_shim_adapters.megatron.policy.requested import COERCION
from precision_shim_adapters.verl.rollout import driver, dtypes, weight_sync
from precision_shim_adapters.verl.training import engines, fsdp, megatron

from ..command import Job
from ..megatron.model import MegatronModel, misplaced, quantized_in
from ..megatron.sizes import read_sizes
from ..record import Decided
from ..request import Plannable, Request, read_request
from ..rollout import listed, predict_sides
from ..shapes import Model
from ..torch_optimizer import ShardedModel, learning_rate, scaling
from ..values import mapping, number_of
from . import sections
from .composing import compose
from .sections import Section, inner

_ENGINES = ("megatron", "fsdp", "fsdp2", "fsdp_turbo", "veomni", "automodel", "torchtitan")
_SHARED = "actor_rollout_ref"
_BETAS = [0.9, 0.999]
"""verl's default of ``optim.betas``, which only torch's optimizers get."""

_where = partial(versioned, "verl")


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
        every = list(_of_ppo(config))
        found = [one for one, unbuilt in every if not unbuilt]
        problems, notes = _both_sides(job, config)
        for one, unbuilt in every:
            notes += sections.tell_not_built(one, unbuilt) if unbuilt else ()
    elif "engine" in config and "optim" in config:
        gpus = _gpus(config)
        if job.processes is not None:  # torchrun starts the job
            gpus = job.processes, "--nproc-per-node x --nnodes"
        found = [sections.of_tuning(config)]
    else:
        raise PlanError(
            f"{_where()}, {job.target}: its config trains no model: expected actor_rollout_ref, or "
            "model, engine and optim. Plan the job that trains."
        )
    readers = ((one.subject, partial(_model, job, one, gpus)) for one in found)
    notes += [*_not_judged(found, added), *tell_unresolved(unresolved)]
    return read_request(job, gpus[0], readers, problems, notes, rollout=_SHARED in config)


def _not_judged(found: Sequence[Section], added: Sequence[str]) -> Iterator[str]:
    """Yield a note on each precision at a key that no rule covers, and that verl's config lacks."""
    judged = [f"{_SHARED}.{dtypes.ROLLOUT}.engine_kwargs."]
    for one in found:
        judged += [f"{key}." for key in (one.engine_key, one.optim_key)]
        judged.append(f"{one.model_key}.override_config.")
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


def _of_ppo(config: Mapping[str, Any]) -> Iterator[tuple[Section, str]]:
    """Yield the models of a PPO job, each with the reason why the job does not build it, or ``""``.

    A rollout with quantized weights reads the dtype in transformers' config.
    """
    shared = inner(config, _SHARED)
    actor = mapping(shared.get("actor"), f"{_SHARED}.actor", _where())
    algorithm, critic = inner(config, "algorithm"), inner(config, "critic")
    model, ref = inner(shared, f"{_SHARED}.model"), inner(shared, f"{_SHARED}.ref")
    group = fsdp.group_of(inner(config, "trainer").get(fsdp.WORKERS))
    one = sections.of_role("actor", f"{_SHARED}.actor", actor, model, group)
    quantized = inner(shared, dtypes.ROLLOUT).get("quantization")
    yield replace(one, model_key=f"{_SHARED}.model", alone=not quantized), ""
    merged = {**ref, "strategy": ref.get("strategy") or actor.get("strategy")}
    penalty = algorithm.get("use_kl_in_reward") or actor.get("use_kl_loss")
    why = "algorithm.use_kl_in_reward and actor.use_kl_loss are off"
    one = sections.of_role("ref", f"{_SHARED}.ref", merged, model, group)
    yield replace(one, model_key=f"{_SHARED}.model"), "" if penalty else why
    enabled, estimator = critic.get("enable"), algorithm.get("adv_estimator")
    why = f"algorithm.adv_estimator={estimator}" if enabled is None else "critic.enable=false"
    built = enabled or (enabled is None and estimator == "gae")
    one = sections.of_role("critic", "critic", critic, inner(critic, "critic.model"), group)
    yield replace(one, model_key="critic.model", alone=True), "" if built else why


def _model(job: Job, section: Section, gpus: tuple[int, str]) -> Plannable:
    if section.strategy not in _ENGINES:
        raise PlanError(
            f"{_where()}, {section.engine_key}: strategy={section.strategy!r}: planned are "
            f"{', '.join(_ENGINES)}. Plan the job with one of these."
        )
    own, place = section.model, section.model_key
    adapters = {f"{place}.lora_rank": own, f"{place}.lora.rank": inner(own, f"{place}.lora")}
    for key, keys in adapters.items():
        job.refuse_adapters(_where(), key, _number(keys, key, 0))
    written = inner(own, f"{place}.override_config")
    others = ("moe_config", "attn_implementation", "model_config")
    overrides = written.get("model_config") or {
        key: value for key, value in written.items() if key not in others
    }
    shapes = job.model(
        own.get("hf_config_path") or own.get("path"),
        {key: value for key, value in overrides.items() if value is not None},
    )
    acts = job.in_force(DISPATCH, GROUP)
    illegal = tuple(sections.unknown(section, dispatches=acts))
    if section.strategy == "megatron":
        spelled = tuple(sections.not_spelled(section))
        alone = (*sections.unknown(section, dispatches=False), *spelled)
        illegal += () if job.in_force(COERCION, GROUP) else spelled
        return replace(_on_megatron(section, shapes, gpus, illegal), alone=alone)
    return _sharded(job, section, shapes, gpus, illegal)


def _on_megatron(
    section: Section, model: Model, gpus: tuple[int, str], illegal: tuple[Problem, ...]
) -> MegatronModel:
    engine, optim = section.engine, section.optim
    fields = f"{section.optim_key}.override_optimizer_config"
    buckets = f"{section.engine_key}.override_ddp_config"
    layers_key = f"{section.engine_key}.override_transformer_config"
    layers = inner(engine, layers_key)
    ddp = inner(engine, buckets)
    inner(optim, fields)
    sections.check_megatron(section)
    requested = megatron.of_configs(
        engine,
        optim,
        subject=section.subject,
        declared=parse_dtype(str(engine.get("dtype") or "bfloat16")),
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
        prefix="++",  # Hydra's prefix that adds or overrides a key
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
    )


def _flags(section: Section, layers: Mapping[str, Any], dtype: torch.dtype) -> Iterator[Problem]:
    """Yield a problem if the model's config gets the flag of another dtype than the engine's."""
    for flag, other in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if layers.get(flag) and dtype is not other:
            key, owner = f"override_transformer_config.{flag}", f"{section.engine_key}.dtype"
            fault = f"{flag}={layers[flag]} beside {owner}={name_of(dtype)}: Megatron takes one"
            remedy = f"Leave it out, or write {owner}={str(other).removeprefix('torch.')}."
            yield Problem("flags", section.subject, f"{section.engine_key}.{key}", fault, remedy)


def _bucket(section: Section, requested: RequestedConfig) -> bool:
    """verl's value of ``grad_reduce_in_fp32`` if the user wrote none.

    verl's ``get_model`` and mbridge set ``grad_reduce_in_fp32`` to True, Megatron-Bridge to False.
    In verl 0.9 and later, the engine derives ``grad_reduce_in_fp32`` from the optimizer's fields.
    """
    aware = requested.opt_in.get(PRECISION_AWARE)
    low = requested.opt_in.get("main_grads_dtype", torch.float32) is not torch.float32
    resolver = look(f"{megatron.ENGINE}._resolve_override_ddp_config")
    if resolver.found and aware and low:
        return False
    if resolver.found and "use_low_precision_main_grads" in resolver.names:
        return True
    engine = section.engine
    return not (engine.get("use_mbridge") and engine.get("vanilla_mbridge") is False)


def _sharded(
    job: Job, section: Section, model: Model, gpus: tuple[int, str], illegal: tuple[Problem, ...]
) -> Plannable:
    engine, subject, trains = section.engine, section.subject, section.trains
    read = sections.read_sharded(section)
    # verl always keeps a forward-only model in the host's memory, even without ``param_offload``.
    forward_only = engine.get("forward_only", True) or engine.get("param_offload")
    on_host = engine.get("offload_policy") if trains else forward_only
    compute, name, module = name_of(read.compute), "", ""
    legacy = section.group == fsdp.LEGACY and subject != "critic"
    scaled: tuple[Decided, ...] = ()
    notes: list[str] = []
    if trains:
        own = read.because == fsdp.OWN_SCALER or (legacy and engines.is_fp16(engine.get("dtype")))
        scaled = scaling(
            job,
            compute,
            read.group,
            read.because,
            framework_default=fsdp.VERLS_SCALER,
            scales_itself=own,
        )
        name = str(section.optim.get("optimizer") or section.optim.get("name") or "AdamW")
        module = str(section.optim.get("optimizer_impl") or "torch.optim") + "."
        if section.strategy in fsdp.COMPUTE_KEYS:
            notes.append(fsdp.find_unscaled(engine, section.strategy, read.compute))
        notes.append(read.note)
    if scaled and read.stored is torch.float16:
        sections.check_moments(section, name)
    keys = {size: f"{section.engine_key}.{key}" for size, key in read.sizes.items()}
    sizes: dict[str, Any] = {
        size: _number(engine, key, -1 if size == "shards" else 1) for size, key in keys.items()
    }
    keys.update(world=gpus[1], optimizer=f"{section.optim_key}.optimizer")
    keys["dtype"] = engines.in_fp32(section.strategy, section.engine_key)
    overrides = f"{section.optim_key}.override_optimizer_config"
    if trains and module == "torch.optim." and section.strategy in ("fsdp", "fsdp2"):
        keys["options"] = overrides
    written = fsdp.written(engine, section.strategy, section.engine_key, reads_dtype=legacy)
    if section.sequence > 1:  # the model's own Ulysses size overrides the engine's
        sizes["context"] = section.sequence
    return ShardedModel(
        subject,
        model,
        gpus[0],
        name_of(read.stored),
        **sizes,
        compute=compute,
        reduce=name_of(read.reduce) if read.reduce else "",
        optimizer=module + name,
        options=inner(section.optim, overrides),
        lr=learning_rate({**section.optim, **inner(section.optim, overrides)}),
        decisions=scaled,
        offload=bool(on_host) and not (trains and section.strategy == "fsdp"),
        value_head=subject == "critic",
        keys=keys,
        wrote=tuple(
            replace(one, needs=one.needs and f"++{one.needs}")  # Hydra's prefix, as on Megatron
            for one in (*written, *sections.overridden(section))
        ),
        illegal=illegal,
        notes=tuple(filter(None, notes)),
    )
