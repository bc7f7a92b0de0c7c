"""Plan SkyRL's jobs from their command line, with SkyRL's config loader.

The loader needs no torch. Plan and worker read the config with one reader, ``skyrl.config``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from math import prod
from typing import Any

import torch

from precision_shim.adapting import look, versioned
from precision_shim.errors import DtypeError, PlanError
from precision_shim.precision.dtypes import name_of
from precision_shim.precision.effect import values_of
from precision_shim.precision.findings import Problem
from precision_shim_adapters.agreement.report import FEATURE as AGREEMENT
from precision_shim_adapters.megatron.policy.legality import GATHERS
from precision_shim_adapters.skyrl import config as reader
from precision_shim_adapters.skyrl.rollout import driver, dtypes
from precision_shim_adapters.skyrl.training import fsdp, megatron
from precision_shim_adapters.skyrl.written import ROLLOUT, note_command_line
from precision_shim_adapters.torch_fp16 import FEATURE

from .command import Job, find_imported
from .megatron.model import MegatronModel, quantized_in
from .megatron.sizes import read_sizes
from .record import Decided
from .request import Plannable, Request, read_request
from .rollout import listed, predict_sides
from .shapes import Model, with_peft
from .torch_optimizer import UNSCALED, ShardedModel, scaling
from .values import no_section, not_built, number, said

_NO_TRAINER = ("main_generate", "serve")
"""Suffixes in the names of SkyRL's entry points that train no model."""

_where = cache(partial(versioned, "skyrl"))


def plan_job(job: Job) -> Request:
    """Read a command line that launches a SkyRL job.

    Raises:
        PlanError: the config or a model cannot be read.
    """
    config, unread = load(job)
    _check_sections(config, type(config)())
    trainer = config.trainer
    world = _count(trainer.placement, "policy")
    problems: list[Problem] = []
    notes: list[str] = []
    if not (_tunes(job) or job.target.endswith(_NO_TRAINER)):
        problems, notes = _sides(job, config)
    if unread:
        notes.append(f"not read, as SkyRL has no such keys: {', '.join(unread)} (of {job.target})")
    for role, because in _absent(trainer).items():
        notes += not_built(role, because, reader.not_read_by_megatron(trainer, role))
    models = _models(job, trainer, world)
    return read_request(job, world, models, problems, notes, rollout=not _tunes(job))


def _sides(job: Job, config: Any) -> tuple[list[Problem], list[str]]:
    """Predict the driver's report on the dtypes of policy, reference model and engines."""
    directory = job.options.model or ""
    try:
        sides = driver.read_sides(config, job.in_force, directory)
    except DtypeError as error:
        # The plan already reports a wrong dtype name in a model's section.
        of_rollout = error.key.startswith(reader.INFERENCE)
        return ([Problem.of(error, "rollout", error.key)] if of_rollout else []), []
    findings, writes = predict_sides(job, sides, ROLLOUT)
    for key, value in writes.items():
        dtypes.write(config, key, value)
    if sides.trainer is not None:
        on = job.in_force(AGREEMENT, ROLLOUT)
        findings += dtypes.judge_syncs(config, may_write=on)
    return listed(findings)


def load(job: Job) -> tuple[Any, list[str]]:
    """Load a job's config, record the user's keys, and return those of the user's entry point.

    Raises:
        PlanError: SkyRL cannot load the config.
    """
    # A user's entry point may have options that are not of the form KEY=VALUE.
    theirs = job.target.startswith("skyrl.")
    words = [word for word in job.arguments if theirs or "=" in word]
    unread: list[str] = []
    try:
        if _tunes(job):
            from skyrl.train.config.sft_config import SFTConfig, build_skyrl_config_for_sft

            config = build_skyrl_config_for_sft(SFTConfig.from_cli_overrides(words))
            words = [f"trainer.policy.{word}" for word in words]
        else:
            from skyrl.train.config import SkyRLTrainConfig

            try:
                config = SkyRLTrainConfig.from_cli_overrides(words)
            except ValueError:
                defaults = SkyRLTrainConfig()
                kept = [word for word in words if theirs or _has(defaults, word.partition("=")[0])]
                config = SkyRLTrainConfig.from_cli_overrides(kept)
                unread = [word.partition("=")[0] for word in words if word not in kept]
                words = kept
        note_command_line(config, words)
    except Exception as error:  # omegaconf and SkyRL raise various errors
        # Other programs, and fine-tuning, have keys that SkyRL's RL config does not have.
        near = _near(words) if theirs and not _tunes(job) else ""
        raise PlanError(
            f"{_where()}, {job.target}: {said(error).rstrip('.')}. {near}Correct the command line."
        ) from error
    return config, unread


def _near(words: list[str]) -> str:
    """Name the key of SkyRL's that is nearest to the first one that SkyRL does not have, if any."""
    from skyrl.train.config import SkyRLTrainConfig

    defaults = SkyRLTrainConfig()
    every = [key for key, value in values_of(defaults) if not is_dataclass(value)]
    every += [
        f"{key}.{one}" for key in every if key.endswith(".mixed_precision") for one in reader.MIXED
    ]
    keys = dict(word.partition("=")[::2] for word in words)
    strategy = keys.get("trainer.strategy", defaults.trainer.strategy)
    for key in (key for key in keys if not _has(defaults, key)):
        last = key.rpartition(".")[2]
        if key == "trainer.fp16":  # the flag that would be beside trainer.bf16
            both = f"{reader.in_fp16(strategy)} and {reader.KEY}=float16"
            return f"Did you mean {both}? "
        elsewhere = [one for one in every if one.rpartition(".")[2] == last]
        near = get_close_matches(key, elsewhere, 1, 0.7) or get_close_matches(key, every, 1, 0.9)
        if near:
            return f"Did you mean {near[0]}? "
    return ""


def _has(section: Any, key: str) -> bool:
    """Whether SkyRL's config has a key; what is no dataclass may have any key."""
    name, _, rest = key.partition(".")
    return not is_dataclass(section) or (
        hasattr(section, name) and (not rest or _has(getattr(section, name), rest))
    )


def _tunes(job: Job) -> bool:
    """Whether a job is supervised fine-tuning, without a rollout."""
    modules = find_imported(job.source) if job.source is not None else []
    tunes = any("sft_config" in module or "sft_trainer" in module for module in modules)
    return tunes or job.target.endswith("main_sft")


def _check_sections(config: Any, defaults: Any, place: str = "") -> None:
    """Raise ``PlanError`` if a section has no keys; SkyRL's loader accepts a string or ``None``."""
    for field in fields(defaults):
        section, default = getattr(config, field.name), getattr(defaults, field.name)
        if is_dataclass(default) != is_dataclass(section) and default is not None:
            raise no_section(section, f"{place}{field.name}", _where())
        if is_dataclass(default):
            _check_sections(section, default, f"{place}{field.name}.")


def _models(job: Job, trainer: Any, world: int) -> Iterator[tuple[str, Callable[[], Plannable]]]:
    strategy = str(trainer.strategy)
    if strategy not in ("megatron", "fsdp", "fsdp2"):
        raise PlanError(
            f"{_where()}, trainer.strategy={strategy!r}: planned are megatron, fsdp and fsdp2. "
            "Write one of them."
        )
    absent = _absent(trainer)
    for role in (role for role in ("policy", "ref", "critic") if role not in absent):
        section = getattr(trainer, role)
        path = section.model.path or trainer.policy.model.path
        on_megatron = strategy == "megatron" and role != "critic"
        lora = reader.read_lora(trainer, role)
        adapt = partial(with_peft, lora, value_head=role == "critic")
        model = job.model(path, adapt=adapt if lora and not on_megatron else None)
        shares = role == "policy" or trainer.placement.colocate_all
        gpus = world if shares else _count(trainer.placement, role)
        read = _on_megatron if on_megatron else _on_fsdp
        yield role, partial(read, job, trainer, role, model, gpus)


def _absent(trainer: Any) -> dict[str, str]:
    """Map each model that the job does not build to the reason."""
    found = {}
    if not reader.has_reference(trainer):
        found["ref"] = "trainer.algorithm has neither use_kl_loss nor use_kl_in_reward"
    if not trainer.critic.model.path:
        found["critic"] = "trainer.critic.model.path is null"
    return found


def _count(place: Any, role: str) -> int:
    names = (f"{role}_num_nodes", f"{role}_num_gpus_per_node")
    keys = {name: f"trainer.placement.{name}" for name in names}
    return prod(number(getattr(place, name, 1), key, _where()) for name, key in keys.items())


def _on_megatron(job: Job, trainer: Any, role: str, model: Model, world: int) -> Plannable:
    config, key = getattr(trainer, role).megatron_config, f"trainer.{role}.megatron_config"
    heads = getattr(config, "mtp_num_layers", None)
    if heads is None:
        heads = model.number("num_nextn_predict_layers")
    # SkyRL builds a reference model with the policy's DDP config.
    ddp_config = trainer.policy.megatron_config.ddp_config
    lora = reader.read_lora(trainer, role)
    stored = bool(lora) and look(reader.ADAPTER_STORE).found
    requested = replace(
        reader.read_requested(trainer, "policy", ddp_config, heads=heads, adapters=stored),
        subject=role,
        trains=role == "policy",
    )
    illegal, notes = _flags(job, trainer, role)
    layers = reader.layers_of(trainer, role)
    predicted = reader.megatron_dtype(trainer, role, job.in_force, job.options.model or "")
    return MegatronModel(
        requested,
        model,
        read_sizes(
            world, f"trainer.placement.{role}_num_gpus_per_node", key, vars(config), reader.LAYERS
        ),
        predicted or requested.declared or torch.bfloat16,
        bucket_in_fp32=bool(getattr(config.ddp_config, reader.BUCKET, False)),
        frozen_routers=bool(getattr(config, "freeze_moe_router", False)),
        key=f"{key}.{reader.KWARGS}.{{}}",
        bucket_key=f"{key}.ddp_config.{reader.BUCKET}",
        takes_name=megatron.takes_name if megatron.coerces_itself() else None,
        illegal=illegal,
        unscaled=UNSCALED,
        notes=notes,
        quantized=quantized_in(layers),
        layers=layers,
        layers_key=f"{key}.{reader.LAYERS}.{{}}",
        gathers=any(getattr(ddp_config, name, False) for name in GATHERS),
        lora=lora,
        unread=() if requested.trains else tuple(reader.not_read_by_megatron(trainer, role)),
    )


def _flags(job: Job, trainer: Any, role: str) -> tuple[tuple[Problem, ...], tuple[str, ...]]:
    """Check that the config does not ask Megatron for fp16 and bf16 at once."""
    place, written = (
        f"trainer.{role}.megatron_config.{reader.LAYERS}",
        reader.layers_of(trainer, role),
    )
    provider = reader.predict_provider(trainer, role, job.in_force, job.options.model or "")
    if provider.fp16 and (provider.bf16 or trainer.bf16):
        key = f"{place}.fp16" if "fp16" in written or not provider.bf16 else f"{place}.bf16"
        fault = (
            f"fp16={provider.fp16} and bf16={provider.bf16} beside trainer.bf16={trainer.bf16}: "
            "Megatron takes one of fp16 and bf16, and the other one comes from the checkpoint or "
            "trainer.bf16, which wins"
        )
        other = "" if "bf16" in written else f" and {place}.bf16=false"
        remedy = f"Leave {key} out, or write trainer.bf16=false{other}."
        return (Problem("flags", role, key, fault, remedy),), ()
    if written.get("fp16") and "bf16" not in written and not provider.checkpoint:
        note = (
            f"{place}.fp16: Megatron refuses it beside a bf16 checkpoint, and the checkpoint is "
            f"not on this machine; {place}.bf16=false allows it"
        )
        return (), (note,)
    return (), ()


def _mixed(role: str, model: Model) -> tuple[Problem, ...]:
    """Find the parameters that transformers keeps in fp32 in a model that SkyRL loads in bf16."""
    if not model.kept:
        return ()
    key = "trainer.bf16" if role == "ref" else f"trainer.{role}.inference_only_init"
    message = (
        f"{_where()}: {role}: {key} loads the model in bf16, and transformers keeps its "
        f"{', '.join(model.kept)} in fp32: FSDP refuses parameters of two dtypes in one layer"
    )
    return (Problem("mixed-dtypes", role, key, message, f"Write {key}=false."),)


def _on_fsdp(job: Job, trainer: Any, role: str, model: Model, world: int) -> Plannable:
    section = getattr(trainer, role)
    config, key = section.fsdp_config, f"trainer.{role}"
    shards = number(config.fsdp_size, f"{key}.fsdp_config.fsdp_size", _where())
    sequence = getattr(section, "sequence_parallel_size", 1)
    mixed = reader.mixed_dtypes(config, f"{key}.fsdp_config")
    trains = role != "ref" and not getattr(section, "inference_only_init", False)
    compute = name_of(mixed["param_dtype"])
    scaled = scaling(job, compute, reader.FSDP, fsdp.scaled_because(role)) if trains else ()
    low = (role == "ref" and trainer.bf16) or (role == "policy" and not trains)
    unscaled = reader.find_unscaled(config, f"{key}.fsdp_config") if trains else ""
    return ShardedModel(
        role,
        model,
        world,
        "bf16" if low else "fp32",  # SkyRL loads a trained model in fp32, even with trainer.bf16
        shards=shards,
        context=number(sequence, f"{key}.sequence_parallel_size", _where()),
        compute=compute,
        reduce=name_of(mixed["reduce_dtype"]),
        optimizer="AdamW" if trains else "",
        decisions=(*scaled, Decided(FEATURE, *fsdp.AUTOCAST)) if scaled else (),
        offload=bool(config.cpu_offload),
        value_head=role == "critic" and not reader.read_lora(trainer, role),
        wrote=tuple(reader.of_fsdp(trainer, role)),
        illegal=_mixed(role, model) if low else (),
        notes=tuple(filter(None, [unscaled])),
        keys={
            "world": f"trainer.placement.{role}_num_gpus_per_node",
            "context": f"{key}.sequence_parallel_size",
        },
    )
