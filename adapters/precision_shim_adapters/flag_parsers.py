"""Parse slime's and miles' launch lines for a plan, with the trainers' own ``parse_args``.

Both trainers read their own flags, Megatron's training flags and SGLang's flags, and check all of
them. The plan leaves out SGLang's flags, because they do not concern the trainer and SGLang needs a
GPU's packages. The plan contacts no other machine, runs no code of a checkpoint, and does not ask a
GPU.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.abc
import importlib.machinery
import os
import re
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from precision_shim.adapting import versioned
from precision_shim.errors import PlanError
from precision_shim.planning.calling import call_quietly
from precision_shim.planning.command import Job, directory_of
from precision_shim.planning.values import said

_LEFT_OUT = ("sglang", "sglang_router")
_OF_OTHERS = (
    *("--sglang-", "--router-", "--eval-sglang-", "--prefill-num-servers"),
    *("--train-backend", "--debug-rollout-only", "--debug-train-only", "--load-debug-rollout-data"),
)
"""The beginnings of the flags that only SGLang reads, and the flags that slime reads before all
other flags, with a separate parser."""

_CHECKPOINTS = ("ref_load", "opd_teacher_load")
"""Flags with a directory that has to exist on the machine of the job."""

_AT_LEAST_1 = (
    *("--actor-num-nodes", "--actor-num-gpus-per-node", "--micro-batch-size"),
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    *("--expert-model-parallel-size", "--rollout-batch-size", "--n-samples-per-prompt"),
)


@dataclass
class Parsed:
    """A launch line's flags.

    Attributes:
        args: the flags of the job.
        roles: each trained model's flags; the model's name is the key.
        flags: maps an attribute of ``args`` to its flag, such as ``--lr``.
        switches: attributes whose flag is written without a value and sets ``True``.
        unknown: words that no parser reads.
        notes: what was not checked.
        schedule: for each model the reason why the trainer cannot make its learning rate schedule.
    """

    args: Namespace = field(default_factory=Namespace)
    roles: dict[str, Namespace] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    schedule: dict[str, str] = field(default_factory=dict)

    def flag(self, name: str) -> str:
        """The flag that sets an attribute; the attribute's name if no flag sets it."""
        return self.flags.get(name, name)


def parse(job: Job) -> Parsed:
    """Parse and check a launch line with the trainer's and Megatron's own functions.

    Raises:
        PlanError: a parser or a check refuses the line, or the job trains without Megatron.
    """
    found, parsers = Parsed(), list[ArgumentParser]()

    def keep(parser: ArgumentParser) -> ArgumentParser:
        parsers.append(parser)
        return parser

    with (
        _stand_ins(job.framework),
        mock.patch.object(sys, "argv", ["train.py", *job.arguments]),
        mock.patch.dict(os.environ, job.environ),
        _without_gpu(),
    ):
        own = _imported(job, "utils.arguments")
        theirs = _imported(job, "backends.megatron_utils.arguments")
        if job.framework == "miles":
            _refuse_fsdp(job, _called(job, own.parse_args_train_backend))
        with _offline(job, own, theirs, found, parsers):
            found.args = _called(job, lambda: own.parse_args(keep))
        for action in parsers[0]._actions:
            long = [flag for flag in action.option_strings if flag.startswith("--")]
            if long:
                found.flags.setdefault(action.dest, long[0])
            if action.nargs == 0 and action.const is not False:
                found.switches.add(action.dest)
        if not found.args.debug_rollout_only:
            for role in ("actor", "critic")[: 1 + bool(found.args.use_critic)]:
                found.roles[role] = _called(job, partial(_of_role, own, found.args, role))
                found.schedule[role] = _fault_of_schedule(job, found.roles[role])
    return found


def _refuse_fsdp(job: Job, backend: str) -> None:
    if backend != "megatron":
        raise PlanError(
            f"{versioned(job.framework)}, --train-backend {backend}: planned are "
            "models on Megatron. Write --train-backend megatron."
        )


def _of_role(own: Any, args: Namespace, role: str) -> Namespace:
    """Return the flags with which a trainer's actor or critic builds its model."""
    if path := getattr(args, "megatron_config_path", None):
        found: Namespace = own.parse_megatron_role_args(args, path, role)
        return found
    args = copy.deepcopy(args)
    if role == "critic" and hasattr(args, "critic_lr"):  # miles
        args.lr, args.lr_warmup_iters = args.critic_lr, args.critic_lr_warmup_iters
        args.load = args.critic_load
    return args


def _fault_of_schedule(job: Job, args: Namespace) -> str:
    """Make the learning rate's schedule as the trainer does; return the reason of a failure."""
    if getattr(args, "debug_disable_optimizer", False):
        return ""
    model = _imported(job, "backends.megatron_utils.model")
    optimizer = SimpleNamespace(param_groups=[{}])
    try:
        make = model.get_optimizer_param_scheduler
        call_quietly(lambda: make(copy.deepcopy(args), optimizer), PlanError)
    except PlanError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def _offline(
    job: Job, own: Any, theirs: Any, found: Parsed, parsers: Sequence[ArgumentParser]
) -> Iterator[None]:
    """Let a trainer check its flags without SGLang, other machines and files of another machine."""

    def config(path: str, **options: Any) -> Any:
        try:
            directory = str(job.options.model or directory_of(path))
            return load(directory, trust_remote_code=False, local_files_only=True)
        except Exception:  # no such directory, or a class in the checkpoint's own code
            found.notes.append(
                f"not compared with the flags: the config.json of --hf-checkpoint {path}, which "
                "cannot be read on this machine"
            )
            return SimpleNamespace(model_type="")

    def known_only(extra_args_provider: Any, **options: Any) -> Namespace:
        args: Namespace = parse_known(extra_args_provider, ignore_unknown_args=True)
        args.sglang_cuda_graph_backend_prefill = "disabled"  # read and not used by miles' checks
        found.unknown += _unknown(job, parsers[0])
        if found.unknown and job.framework == "miles":
            raise PlanError(
                f"{versioned(job.framework)}: it does not know {', '.join(found.unknown)}. Correct "
                "the line."
            )
        return args

    def check(args: Namespace) -> None:
        for flag in _AT_LEAST_1:
            value = getattr(args, flag[2:].replace("-", "_"), 1)
            if value < 1:
                raise PlanError(
                    f"{versioned(job.framework)}, {flag} {value}: expected a whole number, at "
                    "least 1. Write 1 or more."
                )
        if args.debug_rollout_only and not args.colocate and args.rollout_num_gpus is None:
            raise PlanError(
                f"{versioned(job.framework)}: --debug-rollout-only needs --rollout-num-gpus or "
                "--colocate. Add one of them."
            )
        if (args.kl_coef != 0 or args.use_kl_loss) and not args.ref_load:
            raise PlanError(
                f"{versioned(job.framework)}: --kl-coef and --use-kl-loss need the reference "
                "model's weights: expected --ref-load. Write it, or leave them out."
            )
        written = args.load
        absent = {name: getattr(args, name) for name in _CHECKPOINTS}
        absent = {name: path for name, path in absent.items() if path and not os.path.exists(path)}
        for name, path in absent.items():
            setattr(args, name, os.curdir)
            flag = f"--{name.replace('_', '-')}"
            found.notes.append(f"not checked: {flag} {path}, which is not on this machine")
        validate(args)
        if "ref_load" in absent and args.load == os.curdir:
            args.load = absent["ref_load"]
        vars(args).update(absent)
        if written and not args.load:
            args.load = written
            found.notes.append(f"not checked: --load {written}, which is not on this machine")

    def nothing(args: Namespace, *more: Any, **options: Any) -> None: ...

    name = f"{job.framework}_validate_args"
    validate = getattr(own, name)
    changes: list[tuple[Any, str, Any]] = [
        (own, name, check),
        (own, "sglang_validate_args", nothing),
    ]
    if job.framework == "slime":
        parse_known, load = theirs._megatron_parse_args, theirs.AutoConfig.from_pretrained
        changes += [
            (own, "sglang_parse_args", Namespace),
            (own, "apply_external_engine_info_to_args", nothing),  # it asks SGLang's servers
            (theirs, "_megatron_parse_args", known_only),
            (theirs, "AutoConfig", SimpleNamespace(from_pretrained=config)),
        ]
    else:
        parse_known, load = theirs.parse_args, own.load_hf_config
        changes += [(theirs, "parse_args", known_only), (own, "load_hf_config", config)]
    with contextlib.ExitStack() as stack:
        for place, attribute, value in changes:
            stack.enter_context(mock.patch.object(place, attribute, value))
        yield


def _unknown(job: Job, parser: ArgumentParser) -> list[str]:
    """List the words that no parser of the trainer reads, without values of SGLang's flags."""
    words, skipped = [], False
    for word in job.arguments:
        flag = word.startswith("-") and not re.match(r"-\.?\d", word)
        skipped = word.startswith(_OF_OTHERS) if flag else skipped
        words += [] if skipped else [word]
    return parser.parse_known_args(words)[1]


def _without_gpu() -> AbstractContextManager[Any]:
    """Without a GPU here, validate as for Blackwell: Megatron asks the GPU if TP or CP is on."""
    import torch

    if torch.cuda.is_available():
        return contextlib.nullcontext()
    place = "megatron.training.arguments.get_device_arch_version"
    return mock.patch(place, return_value=10, create=True)


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
            f"{versioned(job.framework)}, {job.target}: {why.rstrip('.')}. Correct the command "
            "line."
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
    """Finds SGLang's packages, all empty."""

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
