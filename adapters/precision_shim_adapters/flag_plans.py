"""Plan slime's and miles' jobs from their launch lines, with the trainers' own parsers.

slime and miles read their own flags, Megatron's training flags and SGLang's flags. The plan ignores
SGLang's flags, because they do not concern the trainer and SGLang needs a GPU's packages.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from precision_shim.adapting import versioned
from precision_shim.errors import PlanError
from precision_shim.planning.calling import call_quietly
from precision_shim.planning.command import Job
from precision_shim.planning.request import Request
from precision_shim.planning.values import no_adapters, said

from . import miles, slime
from .megatron import Wishes
from .megatron.planning.plan import MegatronModel
from .megatron.planning.sizes import read_sizes

_READ: dict[str, Callable[[Any, str], Wishes]] = {"slime": slime.read, "miles": miles.read}
"""The functions that read the flags in the plan and in the worker."""

_LEFT_OUT = ("sglang", "sglang_router")
_ROLLOUT = ("--sglang-", "--router-", "--eval-sglang-")
"""The beginnings of the flags that only SGLang reads."""

_BEFORE = (
    *("--train-backend", "--debug-rollout-only"),
    *("--debug-train-only", "--load-debug-rollout-data"),
)
"""Flags that slime reads before all other flags, with a separate parser."""

_LESS = (
    *("only_train_params_name_list", "freeze_params_name_list", "use_stateless_adam"),
    *("stream_optimizer_state_to_disk", "debug_disable_optimizer"),
)
"""Flags with which a GPU keeps fewer tensors than the plan counts."""


def plan_job(job: Job) -> Request:
    """Read a launch line of slime's or miles' ``train.py``.

    Raises:
        PlanError: a parser refuses the line, the model cannot be read, or the plan does not support
            a flag.
    """
    args, unknown = _parsed(job)
    where = versioned(job.framework)
    if getattr(args, "lora_rank", 0) or getattr(args, "lora_adapter_path", None):
        raise no_adapters(f"{where}, --lora-rank", "--lora-rank 0")
    roles = ["actor"]
    if args.advantage_estimator == "ppo":
        roles.append("critic")
    models = tuple(_model(job, args, role) for role in roles)
    notes = ["not counted: what a model keeps in the host's memory while other models use the GPUs"]
    if args.kl_coef != 0 or args.use_kl_loss:
        notes.append("not counted: the reference model, whose weights are in the host's memory")
    less = [f"--{name.replace('_', '-')}" for name in _LESS if getattr(args, name, None)]
    if less:
        notes.append(f"counted as without {', '.join(less)}, so the bytes are an upper bound")
    if unknown:
        notes.append(f"no parser of {where} reads {', '.join(unknown)}: it has no effect")
    version = where.partition(" ")[2] or None
    return Request(
        job.framework, version, args.world_size, models, megatron=True, notes=tuple(notes)
    )


def _model(job: Job, args: Namespace, role: str) -> MegatronModel:
    args = _of_role(job, args, role)
    return MegatronModel(
        _READ[job.framework](args, role),
        job.model(args.hf_checkpoint),
        read_sizes(
            args.world_size,
            "--actor-num-gpus-per-node",
            "--",
            vars(args),
            sequence_parallel=bool(args.sequence_parallel),
        ),
        args.params_dtype,
        bucket_in_fp32=bool(args.accumulate_allreduce_grads_in_fp32),
        value_head=role == "critic",
        key="--{}",
        bucket_key="--accumulate-allreduce-grads-in-fp32",
        place="actor",
    )


def _of_role(job: Job, args: Namespace, role: str) -> Namespace:
    """Return one role's flags; a slime job may have an extra file with each role's flags."""
    path = getattr(args, "megatron_config_path", None)
    args = copy.deepcopy(args)
    if path is None:
        return args
    with _stand_ins(job.framework):
        parser = importlib.import_module(f"{job.framework}.utils.arguments")
        found: Namespace = _called(job, lambda: parser.parse_megatron_role_args(args, path, role))
    return found


def _parsed(job: Job) -> tuple[Namespace, list[str]]:
    """Parse a job's flags; return the parsed flags and the flags that no parser knows."""
    parsers: list[ArgumentParser] = []
    words = ["train.py", *job.arguments]
    with _stand_ins(job.framework), mock.patch.object(sys, "argv", words):
        own = _imported(job, "utils.arguments")
        theirs = _imported(job, "backends.megatron_utils.arguments")
        provider = getattr(own, f"get_{job.framework}_extra_args_provider")()

        def add(parser: ArgumentParser) -> ArgumentParser:
            parsers.append(parser)
            made: ArgumentParser = provider(parser)
            return made

        parse = {"slime": _parse_slime, "miles": _parse_miles}[job.framework]
        args = _called(job, lambda: parse(own, theirs, add))
        if getattr(args, "train_backend", "megatron") != "megatron":
            raise PlanError(
                f"{versioned(job.framework)}, --train-backend {args.train_backend}: planned are "
                "models on Megatron. Write --train-backend megatron."
            )
        _, left = parsers[0].parse_known_args(list(job.arguments))
        unknown = [one for one in left if one.startswith("--") and not _of_another_parser(one)]
        if unknown and job.framework == "miles":
            raise PlanError(
                f"{versioned(job.framework)}: it does not know {', '.join(unknown)}. Correct the "
                "line."
            )
        _called(job, lambda: _read_file(own, args))
        with _without_gpu():
            _called(job, lambda: theirs.validate_args(args))
    return args, unknown


def _parse_slime(own: Any, theirs: Any, add: Callable[..., Any]) -> Namespace:
    before = vars(own._pre_parse_mode())
    args: Namespace = theirs.megatron_parse_args(extra_args_provider=add, skip_hf_validate=True)
    vars(args).update(before)
    return args


def _parse_miles(own: Any, theirs: Any, add: Callable[..., Any]) -> Namespace:
    args = theirs.parse_args(extra_args_provider=add, ignore_unknown_args=True)
    args.rank, args.world_size = 0, args.actor_num_nodes * args.actor_num_gpus_per_node
    found: Namespace = theirs.set_default_megatron_args(args)
    if "train" in own._resolve_ft_components(found):
        found.indep_dp = found.save_local_weight_checksum = found.enable_witness = True
    if found.indep_dp:  # each replica is a job of its own, whose states are not sharded
        found.world_size = own.compute_megatron_world_size_except_dp(found)
    return found


@contextlib.contextmanager
def _without_gpu() -> Iterator[None]:
    """On a machine without a GPU, report a Blackwell GPU to Megatron's checks of TP and CP."""
    import torch

    if torch.cuda.is_available():
        yield
        return
    place = "megatron.training.arguments.get_device_arch_version"
    with mock.patch(place, return_value=10, create=True):
        yield


def _read_file(own: Any, args: Namespace) -> None:
    """Read further flags from the YAML file of ``--custom-config-path``, as slime and miles do."""
    if args.custom_config_path:
        read = getattr(own, "resolve_file_arg", lambda path: Path(path).read_text())  # miles has it
        vars(args).update(own.yaml.safe_load(read(args.custom_config_path)) or {})


def _of_another_parser(flag: str) -> bool:
    return flag.startswith(_ROLLOUT) or flag.partition("=")[0] in _BEFORE


def _imported(job: Job, name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(f"{job.framework}.{name}")
    except Exception as error:  # the import may raise any error
        raise PlanError(
            f"{versioned(job.framework)}, {job.target}: its arguments cannot be read: "
            f"{said(error)}. Run the plan in the environment of the job."
        ) from error


def _called(job: Job, call: Callable[[], Any]) -> Any:
    """Call a trainer's or Megatron's function; an error in the function raises ``PlanError``."""

    def refuse(why: str) -> PlanError:
        return PlanError(
            f"{versioned(job.framework)}, {job.target}: {why}. Correct the command line."
        )

    return call_quietly(call, refuse)


class _Nothing:
    """Replaces any function or class of SGLang; a call does nothing and returns the replacement."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports an empty module in place of each package of SGLang."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in _LEFT_OUT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@contextlib.contextmanager
def _stand_ins(framework: str) -> Iterator[None]:
    """Let a trainer's modules be imported without SGLang; on exit, unload the imported modules."""
    before, finder = set(sys.modules), _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in (framework, *_LEFT_OUT):
                del sys.modules[name]
