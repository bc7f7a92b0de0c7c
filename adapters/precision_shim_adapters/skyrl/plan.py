"""Plan SkyRL's jobs from their command line, with SkyRL's own config loader.

The loader needs no torch. Plan and worker read optimizer settings with ``megatron.of_config``.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from precision_shim.adapting import version_of
from precision_shim.errors import DtypeError, PlanError
from precision_shim.planning.calling import ask_framework
from precision_shim.planning.command import Job, find_imported
from precision_shim.planning.record import STATES, WEIGHTS, Decided, Problem
from precision_shim.planning.request import Illegal, Plannable, Request
from precision_shim.planning.shapes import Model, is_router
from precision_shim.planning.values import no_adapters, no_section, number, said
from precision_shim.precision.dtypes import name_of

from ..fp16 import FEATURE
from ..fp16.plan import ShardedModel, scaling
from ..megatron import DISPATCH
from ..megatron.planning.plan import MegatronModel
from ..megatron.planning.sizes import UNEVEN, read_sizes
from ..rollout import FEATURE as AGREEMENT
from ..rollout import (
    checkpoint_dtype,
    engine_name,
    follows,
    problems_of,
    problems_of_heads,
    wire_problems,
)
from . import fsdp, head, legality, megatron, sides
from .config import INFERENCE, ROLLOUT, note_command_line

_ROLES = ("policy", "ref", "critic")
_PROGRAM = "skyrl.train.entrypoints.main_base"
_NO_TRAINER = ("main_generate", "serve")
"""Suffixes in the names of SkyRL's entry points that train no model."""


def plan_job(job: Job) -> Request:
    """Read a command line that launches a SkyRL job.

    Raises:
        PlanError: the config or a model cannot be read.
    """
    config, passed_over, wrong = load(job)
    trainer = config.trainer
    _check_sections(config)
    world = _count(trainer.placement, "policy")
    models = tuple(_models(job, trainer, world))
    rolls_out = not (_tunes(job) or job.target.endswith(_NO_TRAINER))
    problems, told = (wrong, []) if wrong or not rolls_out else _sides(job, config)
    return Request(
        "skyrl",
        version_of("skyrl", ("skyrl",)),
        world,
        models,
        megatron=any(isinstance(model, MegatronModel) for model in models),
        problems=tuple(problems),
        notes=(
            *(
                f"SkyRL itself does not know these, which {job.target} may: "
                f"{', '.join(passed_over)}"
                for _ in passed_over[:1]
            ),
            *told,
        ),
        ask=partial(_ask, job, config) if rolls_out else None,
    )


def _ask(job: Job, config: Any) -> tuple[list[Problem], list[str]]:
    """Call ``validate_cfg``, which SkyRL's training program calls first."""

    def check() -> Callable[[], object]:
        from skyrl.train.utils.utils import validate_cfg

        return partial(validate_cfg, copy.deepcopy(config))

    # The plan needs no key of a logger's service.
    with mock.patch.dict(os.environ, {"WANDB_API_KEY": "not needed", **job.environ}):
        return ask_framework(check, "validate_cfg", _where(), is_own=job.target == _PROGRAM)


def _sides(job: Job, config: Any) -> tuple[list[Problem], list[str]]:
    """Predict the driver's report on the dtypes of policy, reference model and engines."""
    on = job.in_force(AGREEMENT, ROLLOUT)
    directory = job.options.model or ""
    try:
        engine_name(config.generator.inference_engine.model_dtype, sides.KEY, _where(), also=())
        both = sides.sides_of(config, job.in_force, directory)
    except DtypeError as error:
        # The plan already reports a wrong dtype name in a model's own section.
        own = error.key.startswith(INFERENCE)
        return ([Problem.of(error, "rollout", error.key)] if own else []), []
    heads, fp32 = problems_of_heads(
        _where(), partial(head.read_heads, config, job.in_force), job.settings, on=on
    )
    trainer = both.trainer
    if trainer is None:
        return heads, ["rollout: {}: {} ({})".format(AGREEMENT, *sides.not_compared(config)), *fp32]
    notes = [f"policy: {AGREEMENT}: {trainer.computes} ({trainer.because})"] * bool(trainer.because)
    problems, told = problems_of(
        _where(), trainer, both.others, job.settings, on=on, model_type=both.model_type
    )
    if on:
        for other in both.others:
            name = follows(trainer, other, both.model_type, job.settings["rollout"])
            if name:
                sides.write(config, other.key, name)
        mended = sides.send_in_engines_dtype(config)
        told += [f"rollout: {AGREEMENT}: {chosen} ({because})" for chosen, because in mended]
    lost, rounded = wire_problems(_where(), sides.wires_of(config))
    return [*problems, *lost, *heads], [*notes, *told, *rounded, *fp32]


def _where() -> str:
    return f"skyrl {version_of('skyrl', ('skyrl',))}"


def load(job: Job) -> tuple[Any, list[str], list[Problem]]:
    """Load a job's config, and record the user's keys; return also unknown keys and DtypeErrors.

    Only a user's own entry point may have overrides that SkyRL does not define. If the shim is on
    in this process, SkyRL's loader raises a DtypeError for a wrong ``model_dtype``, which ``load``
    returns as a problem.

    Raises:
        PlanError: SkyRL cannot load the config.
    """
    try:
        import skyrl.train.config as configs
    except ImportError as error:
        raise PlanError(
            f"{_where()}: its config cannot be imported ({error}). Install SkyRL here."
        ) from error
    # A user's own entry point may have options that are not of the form KEY=VALUE.
    own = job.target.startswith("skyrl.")
    words = [word for word in job.arguments if own or "=" in word]
    passed_over: list[str] = []
    wrong: list[Problem] = []
    while True:
        try:
            return _load(configs, job, words), passed_over, wrong
        except DtypeError as error:
            kept = [word for word in words if word.partition("=")[0] != error.key]
            if kept == words:
                raise PlanError(f"{_where()}, {job.target}: {said(error)}") from error
            words = kept
            wrong.append(Problem.of(error, "rollout", error.key))
            continue
        except Exception as error:  # omegaconf and SkyRL raise various errors
            text = " ".join(str(error).split())
            unknown = [] if job.target.startswith("skyrl.") else _unknown(text, words)
            if not unknown:
                _check_written(configs, job, words)
                raise PlanError(
                    f"{_where()}, {job.target}: {said(error)}. Correct the command line."
                ) from error
        words = [word for word in words if word not in unknown]
        passed_over += [word.partition("=")[0] for word in unknown]


def _unknown(message: str, words: list[str]) -> list[str]:
    match = re.search(r"Invalid fields \{(.*?)\}", message)
    names = set(re.findall(r"'([^']+)'", match.group(1))) if match else set()
    return [word for word in words if names & set(word.partition("=")[0].split("."))]


def _tunes(job: Job) -> bool:
    """Whether a job is supervised fine-tuning, without a rollout."""
    modules = find_imported(job.source) if job.source is not None else []
    tunes = any("sft_config" in module or "sft_trainer" in module for module in modules)
    return tunes or job.target.endswith("main_sft")


def _load(configs: Any, job: Job, words: list[str]) -> Any:
    if _tunes(job):
        from skyrl.train.config.sft_config import SFTConfig, build_skyrl_config_for_sft

        tuned = SFTConfig.from_cli_overrides(words)
        prefixed = [f"trainer.policy.{word}" for word in words]
        config = build_skyrl_config_for_sft(tuned)
        note_command_line(config, prefixed)
        return config
    config = configs.SkyRLTrainConfig.from_cli_overrides(words)
    note_command_line(config, words)
    return config


def _check_written(configs: Any, job: Job, words: Sequence[str]) -> None:
    """Check that words which set a section of SkyRL's config give the section keys.

    Raises:
        PlanError: a section has no keys.
    """
    import yaml

    defaults = configs.SFTConfig() if _tunes(job) else configs.SkyRLTrainConfig()
    for word in words:
        key, _, text = word.partition("=")
        section, value = _found(defaults, key), yaml.safe_load(text)
        if (is_dataclass(section) or isinstance(section, dict)) and not isinstance(value, dict):
            raise no_section(value, key, _where())


def _check_sections(config: Any) -> None:
    """Check that sections have keys; SkyRL's loader accepts a string or ``None`` as a section.

    Raises:
        PlanError: a section has no keys.
    """
    keys = ["placement", "critic", "critic.model"]
    keys += [f"{role}.fsdp_config" for role in _ROLES]
    if config.trainer.strategy == "megatron":
        keys += [f"{role}.megatron_config" for role in ("policy", "ref")]
    may_be_null = [f"trainer.{role}.fsdp_config.mixed_precision" for role in _ROLES]
    may_be_null += [f"{INFERENCE}.{section}" for section in sides.OVER[1:]]
    keys = [f"trainer.{key}" for key in keys] + [f"{INFERENCE}.{sides.OVER[0]}"]
    for key in keys + may_be_null:
        section = _found(config, key)
        null = section is None and key in may_be_null
        if not (null or hasattr(section, "__dict__") or isinstance(section, dict)):
            raise no_section(section, key, _where())


def _found(section: Any, key: str) -> Any:
    for name in key.split("."):
        section = getattr(section, name, None)
    return section


def _models(job: Job, trainer: Any, world: int) -> Iterator[Plannable]:
    strategy = str(trainer.strategy)
    if strategy not in ("megatron", "fsdp", "fsdp2"):
        raise PlanError(
            f"{_where()}, trainer.strategy={strategy!r}: planned are megatron, fsdp and fsdp2. "
            "Write one of them."
        )
    for role in _roles(trainer):
        section = getattr(trainer, role)
        rank = getattr(getattr(section.model, "lora", None), "rank", 0)
        if role != "ref" and rank:
            key = f"trainer.{role}.model.lora.rank"
            raise no_adapters(f"{_where()}, {key}={rank}", f"{key}=0")
        path = section.model.path or trainer.policy.model.path
        model = job.model(path)
        gpus = _gpus(trainer, role, world)
        on_megatron = strategy == "megatron" and role != "critic"
        wrong: list[Problem] = []
        if role != "ref":
            wrong += legality.of_optimizer(trainer, role, on_megatron=on_megatron)
        if wrong:
            yield Illegal(role, tuple(wrong), _place(trainer, role))
            continue
        if on_megatron:
            yield _on_megatron(job, trainer, role, model, gpus)
        else:
            yield _on_fsdp(job, trainer, role, model, gpus)


def _roles(trainer: Any) -> list[str]:
    roles = ["policy"]
    if sides.has_reference(trainer):
        roles.append("ref")
    if trainer.critic.model.path:
        roles.append("critic")
    return roles


def _gpus(trainer: Any, role: str, world: int) -> int:
    place = trainer.placement
    if place.colocate_all or role == "policy":
        return world
    return _count(place, role)


def _count(place: Any, role: str) -> int:
    counts = [
        number(getattr(place, name, 1), f"trainer.placement.{name}", _where())
        for name in (f"{role}_num_nodes", f"{role}_num_gpus_per_node")
    ]
    return counts[0] * counts[1]


def _on_megatron(job: Job, trainer: Any, role: str, model: Model, world: int) -> MegatronModel:
    section = getattr(trainer, role)
    config = section.megatron_config
    heads = getattr(config, "mtp_num_layers", None)
    if heads is None:
        heads = model.number("num_nextn_predict_layers")
    # SkyRL builds a reference model with the policy's DDP config.
    ddp_config = trainer.policy.megatron_config.ddp_config
    wishes = replace(
        megatron.of_config(trainer, "policy", ddp_config, heads=heads),
        subject=role,
        trains=role == "policy",
    )
    where = f"trainer.{role}.megatron_config"
    checkpoint = checkpoint_dtype(job.options.model or str(section.model.path or ""))
    provider = megatron.foreseen_provider(
        trainer, role, checkpoint, obeyed=job.in_force(DISPATCH, "megatron")
    )
    foreseen = sides.megatron_dtype(trainer, role, job.in_force, job.options.model or "")
    dtype = foreseen or wishes.declared or torch.bfloat16
    return MegatronModel(
        wishes,
        model,
        read_sizes(
            world,
            f"trainer.placement.{role}_num_gpus_per_node",
            where,
            vars(config),
            sequence_parallel=True,  # SkyRL couples sequence parallelism to tensor parallelism
            within="transformer_config_kwargs",
            within_names=("virtual", *UNEVEN),
        ),
        dtype,
        bucket_in_fp32=bool(getattr(config.ddp_config, "grad_reduce_in_fp32", False)),
        frozen=is_router if getattr(config, "freeze_moe_router", False) else (lambda name: False),
        key=f"{where}.optimizer_config_kwargs.{{}}",
        bucket_key=f"{where}.ddp_config.grad_reduce_in_fp32",
        parked=_find_parked(trainer, role),
        place=_place(trainer, role),
        takes_name=megatron.takes_name if megatron.coerces_itself() else None,
        illegal=tuple(legality.of_transformer(config, role, provider)),
        notes=tuple(legality.notes_of_transformer(config, role, checkpoint)),
    )


def _together(trainer: Any, role: str) -> str:
    """The config key that puts a model on other models' GPUs; empty for a model with own GPUs."""
    if trainer.placement.colocate_all:
        return "colocate_all"
    shares = role in ("policy", "ref") and trainer.placement.colocate_policy_ref
    return "colocate_policy_ref" if shares else ""


def _place(trainer: Any, role: str) -> str:
    return _together(trainer, role) or role


def _find_parked(trainer: Any, role: str) -> dict[str, tuple[str, ...]]:
    """The components that SkyRL offloads while the rollout or another model runs."""
    key = _together(trainer, role)
    alone = key == "colocate_policy_ref" and "ref" not in _roles(trainer)
    return {f"trainer.placement.{key}": WEIGHTS + STATES} if key and not alone else {}


def _on_fsdp(job: Job, trainer: Any, role: str, model: Model, world: int) -> Plannable:
    section = getattr(trainer, role)
    config = section.fsdp_config
    key = f"trainer.{role}"
    shards = number(config.fsdp_size, f"{key}.fsdp_config.fsdp_size", _where())
    sequence = getattr(section, "sequence_parallel_size", 1)
    # SkyRL divides the number of GPUs by fsdp_size, and reads a negative fsdp_size as all GPUs.
    illegal = (
        [Problem("size", role, f"{key}.fsdp_config.fsdp_size", "0 GPUs", "Write -1 for all.")]
        if shards == 0
        else []
    )
    if not illegal:
        every = shards if 0 < shards < world else world
        illegal = [*legality.of_fsdp(config, role, every)]
    try:
        mixed = fsdp.mixed_dtypes(config, f"trainer.{role}.fsdp_config")
    except DtypeError as error:
        return Illegal(role, (Problem.of(error, role, error.key),), _place(trainer, role))
    trains = role != "ref" and not getattr(section, "inference_only_init", False)
    compute = name_of(mixed["param_dtype"])
    scaled = scaling(job, compute, fsdp.GROUP, fsdp.scaled_because(role)) if trains else ()
    low = (role == "ref" and trainer.bf16) or (role == "policy" and not trains)
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
        value_head=role == "critic",
        keys={
            "world": f"trainer.placement.{role}_num_gpus_per_node",
            "shards": f"trainer.{role}.fsdp_config.fsdp_size",
            "context": f"trainer.{role}.sequence_parallel_size",
        },
        parked={} if config.cpu_offload else _find_parked(trainer, role),
        place=_place(trainer, role),
        illegal=tuple(illegal),
    )
