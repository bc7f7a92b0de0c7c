"""Plan ROLL's jobs on Megatron and FSDP2 from their launch lines, with ROLL's own config classes.

ROLL's start scripts compose a config with Hydra and convert it to a config class. The plan finds
the class in the script, and makes the config as the script does. The plan reads each worker's
arguments with the function that the worker itself uses.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from precision_shim.adapting import versioned
from precision_shim.errors import PlanError
from precision_shim.planning.calling import call_quietly
from precision_shim.planning.command import Job, syntax_of
from precision_shim.planning.record import Problem
from precision_shim.planning.request import Request
from precision_shim.planning.values import no_adapters

from . import roll_fsdp_plan, roll_sides
from .megatron.planning.layout import number_of_layers
from .megatron.planning.plan import MegatronModel
from .megatron.planning.sizes import FIELDS, Sizes, read_sizes
from .roll import read
from .roll_legality import of_ends, of_megatron
from .rollout import FEATURE, model_type, problems_of, problems_of_heads

_TRAINS = "megatron_train"
_STRATEGIES = f"strategy_name={_TRAINS} or {roll_fsdp_plan.TRAINS}"
_WORKERS = ("actor_train", "student_train", "student", "sft_train", "critic")


def plan_job(job: Job) -> Request:
    """Read a launch line of one of ROLL's start scripts.

    Raises:
        PlanError: the script, its config or a model cannot be read, a model has LoRA, or a model is
            neither on Megatron nor on FSDP2.
    """
    script = job.source.resolve() if job.source else None  # resolve before the ``os.chdir``
    with _untouched():
        config = _called(job, lambda: _load(job, script))
        workers = list(_workers(job, config))
    models = tuple(
        roll_fsdp_plan.model(job, name, worker, _where())
        if args is None
        else _model(job, name, worker, args)
        for name, worker, args in workers
    )
    if not models:
        raise PlanError(
            f"{_where()}, {job.target}: none of {', '.join(_WORKERS)} has {_STRATEGIES}: planned "
            "are models on Megatron and on FSDP2. Write one of them."
        )
    notes = ["not counted: what workers keep in the host's memory", *_not_planned(config)]
    version = _where().partition(" ")[2] or None
    world = max(worker.world_size for _, worker, _ in workers)
    on_megatron = any(isinstance(model, MegatronModel) for model in models)
    problems, told = _both_sides(job, config)
    return Request(
        "roll",
        version,
        world,
        models,
        megatron=on_megatron,
        problems=tuple(problems),
        notes=(*notes, *told),
    )


def _both_sides(job: Job, config: Any) -> tuple[list[Problem], list[str]]:
    """Predict the report of the job's driver on the dtypes of trainer, reference and rollout."""
    both = roll_sides.engines(config)
    if both is None:
        return [], []
    on = job.in_force(FEATURE, roll_sides.GROUP)
    kind, where = model_type(roll_sides.path_of(config)), versioned("roll")
    problems, notes = problems_of_heads(where, roll_sides.heads, job.settings, on=on)
    found, told = problems_of(where, *both, job.settings, on=on, model_type=kind)
    return [*found, *problems], [*told, *notes]


def _not_planned(config: Any) -> Iterator[str]:
    """Yield a note for each model of the job that is not trained and that the plan leaves out."""
    if getattr(config, "enable_reference", True):
        several = getattr(config, "_reference_configs", {})  # a reference model for each teacher
        found = several if len(several) > 1 else {"reference": None}
        yield from _left_out("the reference model", found, config)
    several = getattr(config, "rewards", None) or {}
    rewards = {f"rewards.{key}": worker for key, worker in several.items()}
    yield from _left_out("a reward model", rewards or {"reward": None}, config)
    yield from _left_out("the teacher model", {"teacher": None}, config)


def _left_out(what: str, found: Mapping[str, Any], config: Any) -> Iterator[str]:
    for key, given in found.items():
        worker: Any = given or getattr(config, key, None)
        strategy = getattr(worker, "strategy_args", None)
        if strategy is not None and worker.device_mapping:
            yield f"not counted: {what} ({key}), on the GPUs {worker.device_mapping}"


def _where() -> str:
    return versioned("roll", called="ROLL")


def _workers(job: Job, config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the config and, on Megatron, the arguments of each worker that trains."""
    seen = []
    for name in _WORKERS:
        worker = getattr(config, name, None)
        strategy = getattr(worker, "strategy_args", None)
        if worker is None or strategy is None or not worker.device_mapping or id(worker) in seen:
            continue
        seen.append(id(worker))  # in distillation, actor_train and student_train are one worker
        if name == "critic" and getattr(config, "adv_estimator", "gae") != "gae":
            continue  # without GAE, ROLL makes no critic
        sharded = strategy.strategy_name == roll_fsdp_plan.TRAINS
        if strategy.strategy_name != _TRAINS and not sharded:
            raise PlanError(
                f"{_where()}, {name}.strategy_args.strategy_name={strategy.strategy_name!r}: "
                f"planned are models on Megatron and on FSDP2. Write {_STRATEGIES}."
            )
        if worker.model_args.lora_target:
            raise no_adapters(
                f"{_where()}, {name}.model_args.lora_target", f"{name} without lora_target"
            )
        worker.name = worker.name or name
        args = None if sharded else _called(job, partial(_arguments, worker, config))
        yield name, worker, args


def _model(job: Job, name: str, worker: Any, args: Any) -> MegatronModel:
    section = f"{name}.strategy_args.strategy_config"
    model, sizes = job.model(worker.model_args.model_name_or_path), _sizes(name, worker, args)
    layers = number_of_layers(model) if model.config else 0
    return MegatronModel(
        read(SimpleNamespace(megatron_train_args=args, worker_config=worker)),
        model,
        sizes,
        torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32,
        bucket_in_fp32=bool(args.accumulate_allreduce_grads_in_fp32),
        key=f"{section}.{{}}",
        bucket_key=f"{section}.accumulate_allreduce_grads_in_fp32",
        place=str(worker.device_mapping),
        illegal=(*of_megatron(name, worker, args), *of_ends(sizes, layers, name)),
        notes=(*_unread(section, args), *roll_fsdp_plan.frozen(name, worker)),
    )


def _sizes(name: str, worker: Any, args: Any) -> Sizes:
    """Read the sizes: ``additional_configs`` has each size that ``strategy_config`` leaves out."""
    section = f"{name}.strategy_args.strategy_config"
    own = {field: value for field, value in vars(args).items() if value is not None}
    more = {key: value for key, value in (args.additional_configs or {}).items() if key not in own}
    sizes = read_sizes(
        worker.world_size,
        f"{name}.device_mapping",
        section,
        {**more, **own},
        sequence_parallel=bool(args.sequence_parallel),
    )
    keys = {
        size: f"{section}.additional_configs.{field}" if field in more else sizes.keys[size]
        for size, field in FIELDS.items()
        if field in more or size not in ("first", "last")  # ROLL cannot load such stages
    }
    # mcore_adapter turns sequence parallelism on where expert parallelism needs it.
    both = sizes.tensor != 1 and sizes.expert != 1
    return replace(
        sizes,
        sequence_parallel=sizes.sequence_parallel or both,
        keys={**{key: sizes.keys[key] for key in ("world", "sequence_parallel")}, **keys},
    )


def _unread(section: str, args: Any) -> Iterator[str]:
    """Yield a note for each setting that ROLL drops, or that changes bytes not counted here."""
    more = sorted(set(args.additional_configs or {}) - set(FIELDS.values()))
    if more:
        words = ", ".join(map(str, more))
        yield f"not planned: {section}.additional_configs ({words}): the bytes are those without"
    if args.optimizer_cpu_offload:
        yield f"{section}.optimizer_cpu_offload: ROLL does not pass it to Megatron: no offload"
    if args.fp8 or args.fp8_param:
        yield (
            f"not planned: {section}.fp8 and fp8_param: fp8 copies of the weights are not counted, "
            "and where the weights are fp8 the shim adds nothing"
        )
    if args.mtp_num_layers:
        yield f"not counted: {section}.mtp_num_layers: the layers that predict further tokens"


def _load(job: Job, script: Path | None) -> Any:
    """Make the config that the job's script makes."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    kind, folder = _class_of(job, script), script.parent if script else Path()
    from_dict = importlib.import_module("dacite").from_dict
    parser = argparse.ArgumentParser(prog=job.target)
    parser.add_argument("--config_path", default="config")
    parser.add_argument("--config_name", default="sppo_config")
    given = parser.parse_args(list(job.arguments))
    GlobalHydra.instance().clear()
    where = str(folder / given.config_path)  # Hydra's ``initialize`` joins these two paths, too
    with initialize_config_dir(where, job_name="app", version_base=None):
        composed = compose(config_name=given.config_name)
    return from_dict(data_class=kind, data=OmegaConf.to_container(composed, resolve=True))


def _class_of(job: Job, script: Path | None) -> Any:
    """The class that the job's script passes to ``from_dict``."""
    nodes = syntax_of(script)
    names = [
        ast.unparse(word.value)
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_dict")
        for word in node.keywords
        if word.arg == "data_class"
    ]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    for node in imports if names else ():
        if names[0] in [one.name for one in node.names]:
            return getattr(importlib.import_module(str(node.module)), names[0])
    raise PlanError(
        f"{_where()}, {job.target}: it has no from_dict(data_class=CLASS, ...) with a class of "
        "ROLL's, which says what its config is. Plan the job from a script that has."
    )


def _arguments(worker: Any, config: Any) -> Any:
    """A worker's Megatron arguments, as ROLL's strategy makes them, but with ``use_cpu=True``."""
    kind = importlib.import_module("mcore_adapter").TrainingArguments

    values = worker.training_args.to_dict() | worker.strategy_args.strategy_config
    values |= {"max_grad_norm": config.max_grad_norm, "use_cpu": True}
    values.setdefault("lr_scheduler_kwargs", {})
    return kind(**values)


def _called(job: Job, call: Callable[[], Any]) -> Any:
    """Call ROLL's code, and turn an error that it raises into a ``PlanError``."""

    def refuse(why: str) -> PlanError:
        return PlanError(
            f"{_where()}, {job.target}: {why}. Run the plan in the environment of the job, and "
            "correct its config."
        )

    return call_quietly(call, refuse)


@contextlib.contextmanager
def _untouched() -> Iterator[None]:
    """Undo side effects of making ROLL's config: environment variables and a folder of logs."""
    before, here = dict(os.environ), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ.update(before)
