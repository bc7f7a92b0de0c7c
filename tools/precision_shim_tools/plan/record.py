"""A plan as plain data, which can be converted to JSON.

A plan has the same parts and components as an audit (``auditing.record``), so that a plan can be
compared with the audits of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from precision_shim.precision.findings import Problem

COMPONENTS = ("params", "frozen", "grad_buckets", "grad_copies", "master", "exp_avg", "exp_avg_sq")
"""The audit's components whose size is proportional to the parameters, in the audit's order."""


@dataclass(frozen=True)
class ComponentSize:
    """The size of one component, such as ``exp_avg``, on one rank of a pipeline stage.

    Attributes:
        bytes: mean size over the data-parallel group's ranks; includes bytes in the host's memory.
        group_bytes: the exact sum of the sizes over the data-parallel group.
        host: the number of ``bytes`` that are in the host's memory.
        sharded: whether the tensors are sharded over the group.
    """

    dtypes: tuple[str, ...] = ()
    bytes: int = 0
    group_bytes: int = 0
    host: int = 0
    sharded: bool = False


@dataclass(frozen=True)
class PlannedPart:
    """Parameters with the same data-parallel group, which may shard their states.

    Attributes:
        name: ``"model"``, or ``"dense"`` and ``"experts"``.
        optimizer: the optimizer's name; empty for a model without an optimizer.
        groups: number of the pipeline stage's data-parallel groups, each with different parameters.
        parameters: number of trainable parameters of a rank's model.
        owned: mean number of parameters whose states a rank stores.
        components: the sizes of the components, by the names in ``COMPONENTS``.
        at_step: the sizes of tensors that exist only while the optimizer steps (``grad_copies``).
    """

    name: str
    optimizer: str
    data_parallel_size: int
    groups: int
    parameters: int
    owned: int
    components: Mapping[str, ComponentSize] = field(default_factory=dict)
    at_step: Mapping[str, ComponentSize] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """The tensors on one GPU of a pipeline stage."""

    stage: int
    parts: tuple[PlannedPart, ...]

    @property
    def totals(self) -> dict[str, int]:
        """The bytes of all parts for one GPU: ``host``, ``gpu``, their sum ``bytes``, and ``peak``.

        ``peak`` is on the GPU while the optimizer steps.
        """
        held = [component for part in self.parts for component in part.components.values()]
        every, host = sum(size.bytes for size in held), sum(size.host for size in held)
        top = sum(size.bytes for part in self.parts for size in part.at_step.values())
        return {"bytes": every, "host": host, "gpu": every - host, "peak": every - host + top}


@dataclass(frozen=True)
class Decided:
    """A choice that the shim would make in the job, and the reason.

    ``without`` says how the job trains without it, if that is wrong; empty if not.
    """

    feature: str
    chosen: str
    because: str
    without: str = ""


def unknown_keys(
    written: Iterable[str],
    names: Collection[str],
    subject: str,
    key: str,
    whose: str,
    *,
    places: Mapping[str, str] = MappingProxyType({}),
) -> list[Problem]:
    """Return a problem for each key of ``written`` that is not in ``names``, if that is not empty.

    ``{}`` in ``key``, such as ``"actor.optim.{}"``, stands for a key's name; ``whose`` names the
    config that allows the keys, such as ``"Megatron's OptimizerConfig"``. ``places`` maps names
    to the keys that take effect under these names, which may be in other sections.
    """
    problems = []
    for name in written if names else ():
        if name not in names:
            message, remedy = f"{whose} has no {name!r}", "Correct the key, or leave it out."
            for near in get_close_matches(name, names, n=1):
                remedy = f"Did you mean {places.get(near, near)}? {remedy}"
            if name in places:
                remedy = f"Write {places[name]}, or leave it out."
            problems.append(Problem("key", subject, key.format(name), message, remedy))
    return problems


@dataclass(frozen=True)
class ModelPlan:
    """The plan of one model of the job.

    Attributes:
        layout: how the model is distributed over the GPUs.
        without: the pipeline stages without the shim.
        with_shim: the pipeline stages with the shim.
        notes: remarks on legal settings.
        source: the file or directory from which names and shapes were read.
        computes: dtype of the parameters while a layer computes.
        format: what its quantized layers compute in; empty if they are not quantized.
        reduces: dtype in which FSDP reduces gradients over the data-parallel ranks; empty for
            Megatron, and without an optimizer.
        warnings: what the training loses with legal settings.
        ends: why the job ends without the shim; empty if it does not.
    """

    subject: str
    parameters: int
    layout: Mapping[str, Any]
    decisions: tuple[Decided, ...]
    without: tuple[Stage, ...]
    with_shim: tuple[Stage, ...]
    notes: tuple[str, ...] = ()
    source: str = ""
    computes: str = ""
    reduces: str = ""
    warnings: tuple[str, ...] = ()
    ends: str = ""
    format: str = ""

    @property
    def fullest(self) -> int:
        """Number of the pipeline stage whose GPUs need the most memory with the shim."""
        return max(self.with_shim, key=lambda stage: stage.totals["peak"]).stage

    @property
    def peak(self) -> int:
        """The largest number of bytes on a GPU with the shim, while the optimizer steps."""
        return self.with_shim[self.fullest].totals["peak"]


@dataclass(frozen=True)
class JobPlan:
    """The memory that a job needs per GPU; ``to_dict()`` converts the plan for JSON.

    Attributes:
        transformer_engine: the TransformerEngine version whose rules apply, or ``None``.
        megatron_core: the Megatron-core version whose rules apply, or ``None``.
        world_size: number of GPUs that train.
        problems: the illegal values in the job's config.
        models: one plan for each model that uses memory of the GPUs that train.
        unset: see ``Job``.
        unsure: whether it may be set by a part of the launch line that is not read.
    """

    framework: str
    version: str | None
    transformer_engine: str | None
    megatron_core: str | None
    world_size: int
    problems: tuple[Problem, ...]
    models: tuple[ModelPlan, ...]
    notes: tuple[str, ...] = ()
    unset: bool = False
    unsure: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as dicts, lists, strings and numbers."""
        values = asdict(self)
        for model, plan in zip(values["models"], self.models, strict=True):
            for side in ("without", "with_shim"):
                stages: tuple[Stage, ...] = getattr(plan, side)
                for shown, stage in zip(model[side], stages, strict=True):
                    shown["totals"] = stage.totals
        return values
