"""What a plan says, as plain data: for Python, for JSON and for people.

The parts and components are the audit's (``auditing.record``), so that a plan can be held against
the audits of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import DtypeError
from ..process.names import meant

COMPONENTS = ("params", "frozen", "grad_buckets", "grad_copies", "master", "exp_avg", "exp_avg_sq")
"""Those of the audit that grow with the parameters, in its order."""

WEIGHTS, STATES = ("params", "frozen"), ("master", "exp_avg", "exp_avg_sq")
"""Those that frameworks move to the host's memory, together or each by itself."""


@dataclass(frozen=True)
class Held:
    """One kind of tensor of a part, on one rank of a pipeline stage.

    Attributes:
        dtypes: canonical names, as the audit has them.
        bytes: the mean over the data-parallel group, the host's memory included.
        group_bytes: the exact sum over that group.
        host: what of ``bytes`` is in the host's memory.
        bytes_per_parameter: by the parameters of the model, or by the owned ones where each rank
            has its share of the states.
        sharded: whether each rank of the group holds a share only.
    """

    dtypes: tuple[str, ...] = ()
    bytes: int = 0
    group_bytes: int = 0
    host: int = 0
    bytes_per_parameter: float = 0.0
    sharded: bool = False


@dataclass(frozen=True)
class Part:
    """Parameters whose optimizer states are shared over one data-parallel group.

    Attributes:
        name: ``"model"``, or ``"dense"`` and ``"experts"``.
        optimizer: what steps them; empty for a model without an optimizer.
        data_parallel_size: number of ranks in the group.
        groups: number of such groups in the pipeline stage, each with parameters of its own.
        parameters: trainable parameters of a rank's model.
        owned: mean number of those whose states a rank holds.
        components: by the names of ``COMPONENTS``.
        at_step: what comes on top while the optimizer steps: ``grad_copies``, and ``unpacked``
            moments.
    """

    name: str
    optimizer: str
    data_parallel_size: int
    groups: int
    parameters: int
    owned: int
    components: Mapping[str, Held] = field(default_factory=dict)
    at_step: Mapping[str, Held] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """What a GPU of one pipeline stage holds."""

    stage: int
    parts: tuple[Part, ...]

    @property
    def totals(self) -> dict[str, int]:
        """All parts together, by a GPU.

        ``bytes``: of everything; ``host``: what of it is in the host's memory; ``gpu``: the rest;
        ``peak``: the rest with what comes on top while the optimizer steps.
        """
        held = [one for part in self.parts for one in part.components.values()]
        every, host = sum(one.bytes for one in held), sum(one.host for one in held)
        top = sum(one.bytes for part in self.parts for one in part.at_step.values())
        return {"bytes": every, "host": host, "gpu": every - host, "peak": every - host + top}


def staying(stages: Sequence[Stage], moved: Iterable[str]) -> int:
    """Bytes of a GPU that stay there while some components are moved to the host.

    Args:
        stages: the pipeline stages.
        moved: the components; gradients are released with the parameters.
    """
    gone = set(moved)
    if "params" in gone:
        gone |= {"grad_buckets", "grad_copies"}
    return max(
        sum(
            held.bytes - held.host
            for part in stage.parts
            for name, held in part.components.items()
            if name not in gone
        )
        for stage in stages
    )


@dataclass(frozen=True)
class Decided:
    """What the shim would choose, and why."""

    feature: str
    chosen: str
    because: str


@dataclass(frozen=True)
class Problem:
    """Something that is illegal.

    Attributes:
        code: such as ``"heads"``; docs/plan.md has them all.
        subject: which model; empty for the whole job.
        key: the config key.
        message: what is there, and what is allowed.
        remedy: what to write instead.
    """

    code: str
    subject: str
    key: str
    message: str
    remedy: str

    @classmethod
    def of(cls, error: DtypeError, subject: str, key: str) -> Problem:
        """A dtype that cannot be; the last sentence of the error is the remedy."""
        message, _, remedy = str(error).rpartition(". ")
        return cls("dtype", subject, key, message or remedy, remedy if message else "")


def too_small(subject: str, key: str, value: int, more: str = "") -> Problem:
    """A group of less than one GPU, of which nothing can be counted."""
    return Problem("size", subject, key, f"{value} is less than 1", f"Write at least 1{more}.")


def whole_heads(subject: str, key: str, name: str, heads: int, ways: int) -> list[Problem]:
    """Attention heads that tensor parallelism cannot split, if these are some."""
    what = f"{name} of {heads} cannot be split {ways} ways"
    remedy = f"Take a divisor of {heads}."
    return [Problem("heads", subject, key, what, remedy)] if heads % ways else []


def unknown_keys(
    written: Iterable[str], known: Collection[str], subject: str, key: str, whose: str
) -> list[Problem]:
    """The keys that are not among those that there are.

    Args:
        written: names of keys.
        known: the names that there are; empty where that is not known.
        subject: which model.
        key: where the config has them; ``{}`` is the name.
        whose: what the names belong to, such as ``"Megatron's OptimizerConfig"``.
    """
    return [
        Problem(
            "key",
            subject,
            key.format(name),
            f"{whose} has no {name!r}",
            f"{_asked(name, known)} Correct the key, or leave it out.".strip(),
        )
        for name in written
        if known and name not in known
    ]


def _asked(name: str, known: Collection[str]) -> str:
    text = meant(name, known)
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class ModelPlan:
    """What one model of the job costs.

    Attributes:
        subject: which model: ``"actor"``.
        parameters: of the whole model.
        layout: how it is spread over the GPUs.
        decisions: what the shim would choose.
        traffic: ``before`` and ``after``: ``reduce_scatter`` and ``all_gather``, in bytes that a
            GPU sends in a step.
        before: the pipeline stages without the shim.
        after: the same with it.
        notes: what is legal and worth knowing.
        source: where names and shapes are from.
        stays: ``before`` and ``after``: what of a GPU it keeps while another model of the job is at
            work.
        place: models of one place share their GPUs.
        computes: dtype of the parameters while a layer computes.
        reduces: dtype of the gradients while they are reduced, where no bucket tells it.
    """

    subject: str
    parameters: int
    layout: Mapping[str, Any]
    decisions: tuple[Decided, ...]
    traffic: Mapping[str, Mapping[str, int]]
    before: tuple[Stage, ...]
    after: tuple[Stage, ...]
    notes: tuple[str, ...] = ()
    source: str = ""
    stays: Mapping[str, int] = field(default_factory=dict)
    place: str = ""
    computes: str = ""
    reduces: str = ""


@dataclass(frozen=True)
class Plan:
    """What a job costs per GPU; ``to_dict()`` is ready for JSON.

    Attributes:
        framework: the framework's name.
        version: its version, or ``None``.
        transformer_engine: the version whose rules hold.
        megatron_core: the version whose rules hold, or ``None``.
        world_size: number of GPUs that train.
        problems: what is illegal.
        models: one for each model that takes memory on these GPUs.
        notes: what concerns the whole job.
    """

    framework: str
    version: str | None
    transformer_engine: str | None
    megatron_core: str | None
    world_size: int
    problems: tuple[Problem, ...]
    models: tuple[ModelPlan, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The plan as dicts, lists, strings and numbers."""
        found = asdict(self)
        for model, one in zip(found["models"], self.models, strict=True):
            for side in ("before", "after"):
                stages: tuple[Stage, ...] = getattr(one, side)
                for shown, stage in zip(model[side], stages, strict=True):
                    shown["totals"] = stage.totals
        return found

    def peak(self, side: str = "after") -> int:
        """The most that one GPU holds: one model steps, of the others there is what stays."""
        most = 0
        for model in self.models:
            top = max(stage.totals["peak"] for stage in getattr(model, side))
            others = (one for one in self.models if one is not model and one.place == model.place)
            most = max(most, top + sum(one.stays.get(side, 0) for one in others))
        return most
