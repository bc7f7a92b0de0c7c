"""Compute the memory that models on FSDP or DTensor need with torch's optimizers.

The plan shows the same bytes with and without the shim, which adds only the few numbers of an fp16
model's loss scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from precision_shim.errors import PlanError
from precision_shim.reporting.problem import Problem
from precision_shim.scaling import ScalerSettings
from precision_shim_adapters.torch_fp16.settings import FEATURE, chosen, settings_for

from .command import Job
from .counting import Precision, Share, part
from .megatron import layout
from .megatron.sizes import Sizes
from .record import Decided, ModelPlan, PlannedPart, Stage
from .request import Rules, Variant
from .shapes import Model

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
        shards: number of ranks that share a copy of a parameter; 0 to compute it from ``replicas``.
        tensor: size of tensor parallelism.
        context: number of context-parallel ranks; parameters are sharded over these ranks as well.
        replicas: number of copies of each parameter; determines the shards if ``shards`` is 0.
        compute: dtype of the parameters while a layer computes.
        reduce: dtype of the gradients while they are reduced.
        optimizer: class name of the optimizer; empty for a model that is not trained.
        offload: whether parameters, gradients and states are in the host's memory.
        value_head: whether the output layer is a value head with one output.
        keys: maps names of these attributes to config keys, for messages.
        decisions: the shim's decisions about this model.
        illegal: problems that the adapter found.
        notes: remarks about legal settings.
    """

    subject: str
    model: Model
    world: int
    dtype: str
    shards: int = 0
    tensor: int = 1
    context: int = 1
    replicas: int = 1
    compute: str = "bf16"
    reduce: str = "fp32"
    optimizer: str = "AdamW"
    offload: bool = False
    value_head: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    decisions: tuple[Decided, ...] = ()
    illegal: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    def plan(self, job: Job, rules: Rules) -> tuple[ModelPlan | None, list[Problem]]:
        """See ``Plannable``."""
        return plan_sharded(self)

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


def plan_sharded(asked: ShardedModel) -> tuple[ModelPlan | None, list[Problem]]:
    """Plan a model's memory; the plan is ``None`` if the model's config has problems.

    Raises:
        PlanError: the shim does not know which states the model's optimizer has, or the model
            cannot be split over the GPUs.
    """
    name = asked.optimizer
    if name and name.rpartition(".")[2].lower() not in LIKE_PARAMETERS:
        raise PlanError(
            f"{asked.subject}: {asked.keys.get('optimizer', 'optimizer')}={name!r}: its states are "
            "not known here; planned are torch's Adam and AdamW. Plan the job with AdamW for an "
            "upper bound."
        )
    fault = _fault(asked)
    if fault:
        raise PlanError(
            f"{asked.subject}: its layout cannot be computed: {fault}. Write sizes that divide it."
        )
    if asked.illegal:
        return None, list(asked.illegal)
    whole = part("model", _share(asked), _precision(asked), asked.optimizer)
    stages = (Stage(0, (_on_host(whole) if asked.offload else whole,)),)
    shards = _shards(asked)
    return (
        ModelPlan(
            asked.subject,
            asked.model.parameters,
            {
                "fsdp": shards,
                "replicas": asked.world // (shards * asked.tensor),
                "tp": asked.tensor,
            },
            asked.decisions,
            stages,
            stages,
            asked.notes,
            asked.model.source,
            asked.compute,
            asked.reduce if asked.optimizer else "",
        ),
        [],
    )


def _fault(asked: ShardedModel) -> str:
    """Why the model cannot be split over the GPUs, with the config's key; empty if it can."""
    fault = layout.fault(_sizes(asked), asked.model, heads_are_shared=False)
    shards, copies = _shards(asked), asked.tensor * asked.context * asked.replicas
    if fault or not (copies < 1 or asked.world % copies or asked.world % (asked.tensor * shards)):
        return fault
    return (
        f"{asked.world} GPUs ({asked.keys.get('world', 'world')}) are no multiple of tensor "
        f"{asked.tensor} x context {asked.context} x replicas {asked.replicas}, or of tensor x "
        f"{shards} shards"
    )


def _sizes(asked: ShardedModel) -> Sizes:
    return Sizes(asked.world, tensor=asked.tensor, context=asked.context, keys=asked.keys)


def _shards(asked: ShardedModel) -> int:
    most = max(asked.world // max(asked.tensor * asked.replicas, 1), 1)
    return asked.shards if 0 < asked.shards < most else most


def _share(asked: ShardedModel) -> Share:
    (stage,) = layout.count(asked.model, _sizes(asked), value_head=asked.value_head)
    numel = stage.dense
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


def _on_host(whole: PlannedPart) -> PlannedPart:
    components = {name: replace(held, host=held.bytes) for name, held in whole.components.items()}
    return replace(whole, components=components, at_step={})
