"""Dataclasses for a job whose config an adapter has read, and ``make``, which plans the job."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from precision_shim.errors import DtypeError, PlanError
from precision_shim.precision.findings import Findings, Problem
from precision_shim.process import settings as _settings
from precision_shim.process.versions import version_of

from .record import JobPlan, ModelPlan

if TYPE_CHECKING:
    from precision_shim.precision.effect import Written

    from .command import Job


@dataclass(frozen=True)
class Rules:
    """The TransformerEngine and Megatron-core versions whose rules apply; ``None`` if unknown."""

    transformer_engine: str | None
    megatron_core: str | None


@dataclass(frozen=True)
class Variant:
    """A model with precision settings that differ from the job's config.

    Attributes:
        gives_up: text on the loss of precision with these settings.
        lines: the settings as lines to paste (config keys or environment variables).
    """

    gives_up: str
    lines: tuple[str, ...]
    model: Plannable


class Plannable(Protocol):
    """A model of a job, as an adapter read it from the job's config."""

    @property
    def subject(self) -> str:
        """Name of the model, such as ``"actor"``."""

    @property
    def wrote(self) -> Sequence[Written]:
        """The dtypes that the user wrote for the model."""

    @property
    def on_megatron(self) -> bool:
        """Whether Megatron trains the model."""

    def plan(self, job: Job, rules: Rules) -> tuple[ModelPlan | None, list[Problem]]:
        """Plan the model; the plan is ``None`` if a problem makes counting impossible."""

    def variants(self, job: Job, rules: Rules) -> Sequence[Variant]:
        """Return variants that need less memory, in the order of their loss of precision."""


@dataclass(frozen=True)
class Request:
    """A job, as an adapter read it from the job's config.

    Attributes:
        world_size: number of GPUs that train.
        models: the models that use memory of the GPUs that train.
        problems: illegal config values of the whole job; each model has a list, too.
        notes: remarks for the user.
        rollout: whether the job has a rollout.
    """

    framework: str
    version: str | None
    world_size: int
    models: tuple[Plannable, ...]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    rollout: bool = True

    @property
    def megatron(self) -> bool:
        """Whether Megatron trains a model of the job."""
        return any(model.on_megatron for model in self.models)


def read_request(
    job: Job,
    world: int,
    readers: Iterable[tuple[str, Callable[[], Plannable]]],
    problems: Iterable[Problem],
    notes: Iterable[str],
    *,
    rollout: bool = True,
) -> Request:
    """Read the models of a job; a model with a dtype that a worker refuses adds a problem.

    ``readers`` has each model's name, and a function that reads the model's config, and raises the
    worker's error. A model that cannot be planned is one of the job's ``refusals``. For the other
    arguments see ``Request``.
    """
    models, problems = [], list(problems)
    for subject, read in readers:
        try:
            models.append(read())
        except DtypeError as error:  # noqa: PERF203
            problems.append(Problem.of(error, subject, error.key))
        except PlanError as error:
            job.refusals.append(error)
    version = version_of(job.framework, (job.framework.replace("-", "_"),))
    return Request(
        job.framework, version, world, tuple(models), tuple(problems), tuple(notes), rollout
    )


NOT_COUNTED = "activations, the rollout engine, CUDA's and NCCL's own memory are not counted"


def _find_idle_keys(wrote: Sequence[Written], model: ModelPlan, where: str) -> Findings:
    """Find the dtypes that the user wrote and that the planned model does not have."""
    # It imports torch, and --help must not wait for that.
    from precision_shim.precision.effect import COMPUTES, REDUCES, without_effect

    held: dict[str, Sequence[str]] = {COMPUTES: (model.computes,), REDUCES: (model.reduces,)}
    for part in (part for stage in model.with_shim for part in stage.parts):
        for name, component in part.components.items():
            held[name] = (*held.get(name, ()), *component.dtypes)
    held = {name: dtypes for name, dtypes in held.items() if any(dtypes)}
    return without_effect(wrote, held, model.subject, where)


def _idle_settings(job: Job, rollout: bool, models: Iterable[ModelPlan]) -> list[str]:
    """Return notes on the shim's settings that nothing in the job reads."""
    acting = {decision.feature for model in models for decision in model.decisions}
    if rollout:
        acting |= {_settings.AGREEMENT} & {*job.settings.features}
    return [
        f"{row.variable}={job.settings[row.name]} has no effect on this job, in which "
        + row.feature
        + (" has nothing to do" if row.feature in job.settings.features else " is left out")
        for row in _settings.idle(job.settings, acting)
    ]


def make(job: Job, request: Request, rules: Rules) -> JobPlan:
    """Plan all models of a job.

    Raises:
        PlanError: the job cannot be planned; the message has the job's problems, too.
    """
    problems = list(request.problems)
    models: list[ModelPlan] = []
    for plannable in request.models:
        try:
            model, faults = plannable.plan(job, rules)
        except PlanError as error:
            job.refusals.append(error)
            continue
        problems += faults
        if model is not None:
            models.append(model)
            where = f"{request.framework} {request.version or ''}".strip()
            if job.in_force("audit", ""):  # which says it in the worker
                reported = {fault.key for fault in faults}
                found = _find_idle_keys(plannable.wrote, model, where)
                problems += (one for one in found.problems if one.key not in reported)
                models[-1] = replace(model, notes=(*model.notes, *found.notes))
    # The rollout's check and the model's reader refuse the same value of the same key.
    problems = list({(one.key, one.message): one for one in problems}.values())
    if job.refusals:
        illegal = [f"illegal, too: {one.key}: {one.message}. {one.remedy}" for one in problems]
        raise PlanError("\n".join([*dict.fromkeys(map(str, job.refusals)), *illegal]))
    notes = [*request.notes, NOT_COUNTED]
    if len(models) == len(request.models) and not job.off:
        notes[-1:-1] = _idle_settings(job, request.rollout, models)
    if request.megatron and rules.transformer_engine is None:
        notes.insert(
            -1,
            "TransformerEngine is not installed here, and a job in this environment could not use "
            "the precision-aware optimizer. The plan is for an environment that has a new one; "
            "--transformer-engine names another version",
        )
    if job.off:
        notes.insert(
            0,
            f"{job.off} is set, so the shim does nothing in this job: both sides "
            f"show what {job.framework} does alone. Unset it to see what the shim would do",
        )
    isolated = "uv" in job.launcher and "--isolated" in job.launcher
    if isolated and not any(re.search("precision[-_]shim", word) for word in job.launcher):
        notes.insert(
            0,
            "uv run --isolated: the environment that it makes has no precision_shim, unless the "
            "project depends on it: add --with /path/to/precision_shim",
        )
    if job.unset:
        notes.insert(
            0,
            f"PRECISION_SHIM is unset{job.launch.doubt}: the job has the shim only if it calls "
            f"install(). To switch it on, {job.launch.remedy}",
        )
    notes[:0] = [*filter(None, [job.launch.describe()]), *job.launch.unread]
    return JobPlan(
        request.framework,
        request.version,
        rules.transformer_engine if request.megatron else None,
        rules.megatron_core if request.megatron else None,
        request.world_size,
        tuple(dict.fromkeys(problems)),
        tuple(models),
        tuple(notes),
        job.unset,
        bool(job.unset and job.launch.unread),
    )
