"""What a plan says, as plain data: for Python, for JSON and for people.

The parts and components are the audit's (``auditing.record``), so that a plan can be compared with
the audits of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import DtypeError
from ..process.names import meant

COMPONENTS = ("params", "frozen", "grad_buckets", "grad_copies", "master", "exp_avg", "exp_avg_sq")
"""The audit's components that grow with the parameters, in the audit's order."""

WEIGHTS, STATES = ("params", "frozen"), ("master", "exp_avg", "exp_avg_sq")
"""Components that frameworks move to the host's memory: weights, optimizer states, or both."""


@dataclass(frozen=True)
class Held:
    """One kind of tensor of a part, on one rank of a pipeline stage.

    Attributes:
        dtypes: canonical names, as in the audit.
        bytes: the mean over the data-parallel group, the host's memory included.
        group_bytes: the exact sum over the data-parallel group.
        host: the part of ``bytes`` that is in the host's memory.
        bytes_per_parameter: bytes per parameter of the model, or per owned parameter where the
            states are sharded.
        sharded: whether each rank of the group holds only a share.
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
        optimizer: the optimizer's name; empty for a model without an optimizer.
        data_parallel_size: number of ranks in the group.
        groups: number of such groups in the pipeline stage, each with parameters of its own.
        parameters: trainable parameters of a rank's model.
        owned: mean number of parameters whose states a rank holds.
        components: by the names of ``COMPONENTS``.
        at_step: tensors that exist only while the optimizer steps: ``grad_copies``, and
            ``unpacked`` moments.
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
        """The bytes of all parts together, for one GPU.

        ``bytes``: all; ``host``: those in the host's memory; ``gpu``: those on the GPU; ``peak``:
        those on the GPU while the optimizer steps.
        """
        held = [component for part in self.parts for component in part.components.values()]
        every, host = sum(size.bytes for size in held), sum(size.host for size in held)
        top = sum(size.bytes for part in self.parts for size in part.at_step.values())
        return {"bytes": every, "host": host, "gpu": every - host, "peak": every - host + top}


def staying(stages: Sequence[Stage], moved: Iterable[str]) -> int:
    """Bytes that stay on a GPU while some components are on the host: the maximum over stages.

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
        """Turn an error about a dtype into a problem; the error's last sentence is the remedy."""
        message, _, remedy = str(error).rpartition(". ")
        return cls("dtype", subject, key, message or remedy, remedy if message else "")


def too_small(subject: str, key: str, value: int, more: str = "") -> Problem:
    """The problem that a group has less than one GPU."""
    return Problem("size", subject, key, f"{value} is less than 1", f"Write at least 1{more}.")


def whole_heads(subject: str, key: str, name: str, heads: int, ways: int) -> list[Problem]:
    """The problem that tensor parallelism cannot split the attention heads, if it cannot."""
    what = f"{name} of {heads} cannot be split {ways} ways"
    remedy = f"Take a divisor of {heads}."
    return [Problem("heads", subject, key, what, remedy)] if heads % ways else []


def unknown_keys(
    written: Iterable[str], known: Collection[str], subject: str, key: str, whose: str
) -> list[Problem]:
    """A problem for each key that does not exist.

    Args:
        written: names of keys in the job's config.
        known: the names that exist; empty where these are not known.
        subject: which model.
        key: path of the keys in the job's config, with ``{}`` for the name.
        whose: what the names belong to, such as ``"Megatron's OptimizerConfig"``.
    """
    return [
        Problem(
            "key",
            subject,
            key.format(name),
            f"{whose} has no {name!r}",
            f"{_suggest(name, known)} Correct the key, or leave it out.".strip(),
        )
        for name in written
        if known and name not in known
    ]


def _suggest(name: str, known: Collection[str]) -> str:
    text = meant(name, known)
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class ModelPlan:
    """What one model of the job costs.

    Attributes:
        subject: which model: ``"actor"``.
        parameters: number of parameters of the whole model.
        layout: how the model is spread over the GPUs.
        decisions: what the shim would choose.
        traffic: for ``before`` and ``after``, the bytes that a GPU sends in a step for
            ``reduce_scatter`` and ``all_gather``.
        before: the pipeline stages without the shim.
        after: the pipeline stages with the shim.
        notes: what is legal and worth knowing.
        source: where names and shapes are from.
        stays: for ``before`` and ``after``, the bytes that the model keeps on a GPU while another
            model of the job works.
        place: models of one place share their GPUs.
        computes: dtype of the parameters while a layer computes.
        reduces: dtype in which gradients are reduced, where there is no bucket to show it.
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
        told = asdict(self)
        for model, plan in zip(told["models"], self.models, strict=True):
            for side in ("before", "after"):
                stages: tuple[Stage, ...] = getattr(plan, side)
                for shown, stage in zip(model[side], stages, strict=True):
                    shown["totals"] = stage.totals
        return told

    def peak(self, side: str = "after") -> int:
        """The most bytes that a GPU holds: one model steps, the others on it keep ``stays``."""
        most = 0
        for model in self.models:
            top = max(stage.totals["peak"] for stage in getattr(model, side))
            others = (one for one in self.models if one is not model and one.place == model.place)
            most = max(most, top + sum(other.stays.get(side, 0) for other in others))
        return most
