"""Compute the memory that models on FSDP or DTensor need with torch's optimizers.

The plan shows the same bytes with and without the shim, unless the shim stores the parameters in
another dtype: beside that, the shim adds only the few numbers of an fp16 model's loss scaler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from precision_shim.adapting import meant
from precision_shim.errors import PlanError
from precision_shim.planning.command import Job
from precision_shim.planning.counting import SIZES, Precision, Share, part
from precision_shim.planning.record import (
    Decided,
    Held,
    ModelPlan,
    Part,
    Problem,
    Stage,
    staying,
    too_small,
    unknown_keys,
    whole_heads,
)
from precision_shim.planning.request import Rules, Variant
from precision_shim.planning.shapes import Model
from precision_shim.planning.text import list_parked
from precision_shim.scaling import ScalerSettings

from ..megatron.planning.layout import rank_numel
from ..megatron.planning.sizes import Sizes
from .legality import of_arguments
from .settings import chosen, settings_for
from .training import FEATURE

LIKE_PARAMETERS = ("adamw", "adam", "_adamw", "_adam")
"""Names of optimizers whose two moments have the parameters' dtype."""


@dataclass(frozen=True)
class ShardedModel:
    """One model of a job on FSDP or DTensor.

    Attributes:
        subject: the model's name, such as ``"actor"``.
        model: names and shapes of the model's weights.
        world: number of GPUs.
        dtype: canonical name of the dtype in which the parameters are stored.
        alone: the same without the shim; empty if it is ``dtype``.
        shards: number of ranks that share a copy of a parameter; 0 to compute it from ``replicas``.
        tensor: size of tensor parallelism.
        context: number of context-parallel ranks; parameters are sharded over these ranks as well.
        replicas: number of copies of each parameter; determines the shards if ``shards`` is 0.
        compute: dtype of the parameters while a layer computes.
        reduce: dtype of the gradients while they are reduced.
        optimizer: class name of the optimizer; empty for a model that is not trained.
        offload: whether parameters, gradients and states are in the host's memory.
        gathers: how often a step gathers the parameters.
        value_head: whether the output layer is a value head with one output.
        keys: maps names of these attributes to config keys, for messages.
        decisions: the shim's decisions about this model.
        parked: maps a config key to the components that the key moves to the host while they are
            unused.
        place: name of a group of GPUs; models with the same ``place`` share these GPUs.
        illegal: problems that the adapter found.
        notes: remarks about legal settings.
    """

    subject: str
    model: Model
    world: int
    dtype: str
    alone: str = ""
    shards: int = 0
    tensor: int = 1
    context: int = 1
    replicas: int = 1
    compute: str = "bf16"
    reduce: str = "fp32"
    optimizer: str = "AdamW"
    offload: bool = False
    gathers: int = 2
    value_head: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    decisions: tuple[Decided, ...] = ()
    parked: Mapping[str, Sequence[str]] = field(default_factory=dict)
    place: str = ""
    illegal: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    def plan(self, job: Job, rules: Rules) -> tuple[ModelPlan | None, list[Problem]]:
        """See ``Plannable``."""
        return plan_sharded(self)

    def on(self, world: int) -> ShardedModel:
        """See ``Plannable``."""
        return replace(self, world=world)

    def variants(self, job: Job, rules: Rules) -> Sequence[Variant]:
        """Return nothing, because the shim has no cheaper settings for torch's optimizers."""
        return ()


def scaling(
    job: Job,
    compute: str,
    group: str,
    because: str,
    *,
    configured: Callable[[], Mapping[str, Any]] = dict,
    framework_default: ScalerSettings | None = None,
) -> tuple[Decided, ...]:
    """The shim's decision to scale a trained model's loss; empty if the shim does not scale losses.

    Args:
        job: the model's job.
        compute: canonical name of the parameters' dtype while a layer computes.
        group: name of the seam group that would scale the loss.
        because: the reason for scaling that the job's worker would report.
        configured: function that reads the framework's scaler block; see ``settings_for``.
        framework_default: see ``settings_for``.
    """
    if compute != "fp16" or not job.in_force(FEATURE, group):
        return ()
    made = settings_for(configured(), framework_default, job.settings)
    return (Decided(FEATURE, chosen(made), because),)


def of_torch(
    name: str, written: Mapping[str, Any], keys: tuple[str, str], subject: str
) -> Iterator[Problem]:
    """List problems of an optimizer's name or arguments that torch would refuse.

    Args:
        name: the name of a class of ``torch.optim``.
        written: the optimizer's further arguments in the job's config.
        keys: config keys of the optimizer's name and of an argument (``{}``: the argument's name).
        subject: which model.
    """
    kind = getattr(torch.optim, name, None)
    if not inspect.isclass(kind):
        names = [word for word in dir(torch.optim) if inspect.isclass(getattr(torch.optim, word))]
        yield Problem(
            "key",
            subject,
            keys[0],
            f"torch.optim has no {name!r}; {meant(name, names)}".rstrip("; ?"),
            "Write the name of a class of torch.optim.",
        )
        return
    known = [parameter for parameter in inspect.signature(kind).parameters if parameter != "params"]
    yield from unknown_keys(list(map(str, written)), known, subject, keys[1], f"torch.optim.{name}")
    yield from of_arguments(name, written, keys[1], subject)


def plan_sharded(asked: ShardedModel) -> tuple[ModelPlan | None, list[Problem]]:
    """Plan a model's memory; the plan is ``None`` if the model's config has problems.

    Raises:
        PlanError: the shim does not know which states the model's optimizer has.
    """
    name = asked.optimizer
    if name and name.rpartition(".")[2].lower() not in LIKE_PARAMETERS:
        raise PlanError(
            f"{asked.subject}: {asked.keys.get('optimizer', 'optimizer')}={name!r}: its states are "
            "not known here; planned are torch's Adam and AdamW. Plan the job with AdamW for an "
            "upper bound."
        )
    problems_found = [*asked.illegal, *problems(asked)]
    if problems_found:
        return None, problems_found
    after = _stages(asked)
    before = _stages(replace(asked, dtype=asked.alone)) if asked.alone else after
    traffic = _traffic(asked)
    moved = [name for components in asked.parked.values() for name in components]
    return (
        ModelPlan(
            asked.subject,
            asked.model.parameters,
            layout(asked),
            asked.decisions,
            {"before": traffic, "after": traffic},
            before,
            after,
            (*asked.notes, *list_parked(after, asked.parked)),
            asked.model.source,
            {"before": staying(before, moved), "after": staying(after, moved)},
            asked.place,
            asked.compute,
            asked.reduce if asked.optimizer else "",
        ),
        problems_found,
    )


def _stages(asked: ShardedModel) -> tuple[Stage, ...]:
    whole = part("model", _share(asked), _precision(asked), asked.optimizer)
    return (Stage(0, (_on_host(whole) if asked.offload else whole,)),)


def problems(asked: ShardedModel) -> list[Problem]:
    """List the parallel group sizes that do not divide the model's GPUs or attention heads."""
    told = []

    def report(code: str, key: str, message: str, remedy: str) -> None:
        told.append(Problem(code, asked.subject, asked.keys.get(key, key), message, remedy))

    groups = ("world", "tensor", "context", "replicas")
    for key in groups:
        value = getattr(asked, key)
        if value < 1:
            told.append(too_small(asked.subject, asked.keys.get(key, key), value))
    if told:
        return told
    product = asked.tensor * asked.context * asked.replicas
    if asked.world % product:
        # The key of a group that alone fits no number of whole copies, if there is one.
        alone = [key for key in groups if asked.world % getattr(asked, key)]
        report(
            "world-size",
            alone[0] if alone else "world",
            f"{asked.world} GPUs ({asked.keys.get('world', 'world')}) are not a multiple of "
            f"{product}, which is tensor {asked.tensor} x context {asked.context} x replicas "
            f"{asked.replicas}",
            "Take a multiple of it, or smaller groups.",
        )
        return told
    ways = asked.tensor * _shards(asked)
    if asked.world % ways:
        report(
            "world-size",
            "shards",
            f"{asked.world} GPUs are not a multiple of {ways}, which is {_shards(asked)} shards x "
            f"tensor {asked.tensor}",
            "Take a divisor of the number of GPUs.",
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads, key = asked.model.number(name), asked.keys.get("tensor", "tensor")
        told += whole_heads(asked.subject, key, name, heads, asked.tensor)
    return told


def layout(asked: ShardedModel) -> dict[str, Any]:
    """The sizes of the model's parallel groups, by the groups' usual abbreviations."""
    shards = _shards(asked)
    replicas = asked.world // (shards * asked.tensor)
    return {"fsdp": shards, "replicas": replicas, "tp": asked.tensor}


def _shards(asked: ShardedModel) -> int:
    most = max(asked.world // max(asked.tensor * asked.replicas, 1), 1)
    return asked.shards if 0 < asked.shards < most else most


def _share(asked: ShardedModel) -> Share:
    sizes = Sizes(asked.world, tensor=asked.tensor)
    split = bool(asked.model.config)
    numel = sum(
        rank_numel(weight, sizes) if split else -(-weight.numel // asked.tensor)
        for weight in asked.model.weights
        if not (asked.value_head and weight.name.endswith("lm_head.weight"))
    )
    if asked.value_head:
        numel += asked.model.number("hidden_size", "n_embd")
    shards = _shards(asked)
    return Share(
        numel if asked.optimizer else 0,
        0 if asked.optimizer else numel,
        group=shards,
        groups=asked.world // shards,
        params_sharded=shards > 1,
        states_sharded=shards > 1,
    )


def _precision(asked: ShardedModel) -> Precision:
    if not asked.optimizer:
        return Precision(asked.dtype, buckets=False)
    return Precision(asked.dtype, asked.dtype, "", asked.dtype, asked.dtype, buckets=False)


def _on_host(whole: Part) -> Part:
    components = {
        name: Held(
            held.dtypes,
            held.bytes,
            held.group_bytes,
            held.bytes,
            held.bytes_per_parameter,
            held.sharded,
        )
        for name, held in whole.components.items()
    }
    return Part(
        whole.name,
        whole.optimizer,
        whole.data_parallel_size,
        whole.groups,
        whole.parameters,
        whole.owned,
        components,
    )


def _traffic(asked: ShardedModel) -> dict[str, int]:
    share = _share(asked)
    numel = share.trainable + share.frozen
    around = numel * (share.group - 1) // share.group
    reduced = around * SIZES[asked.reduce] if asked.optimizer else 0
    return {"reduce_scatter": reduced, "all_gather": around * SIZES[asked.compute] * asked.gathers}
