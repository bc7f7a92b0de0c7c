"""Compute the memory that models on FSDP or DTensor need with torch's optimizers.

The plan shows the same bytes with and without the shim, which adds only the few numbers of an fp16
model's loss scaler.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from precision_shim.errors import PlanError
from precision_shim.precision.effect import Written
from precision_shim.precision.findings import Problem
from precision_shim.precision.updates import without_masters
from precision_shim.scaling import ScalerSettings
from precision_shim_adapters.torch_fp16.settings import FEATURE, chosen, settings_for

from .command import Job
from .counting import Precision, Share, part
from .megatron import layout
from .megatron.sizes import Sizes
from .record import Decided, ModelPlan, PlannedPart, Stage
from .request import Rules, Variant
from .shapes import Model

_ADAM = re.compile(r"((torch|torchao)\.optim\.(\w+\.)*)?_?adamw?", re.IGNORECASE)
"""Matches the optimizers that have two moments and no other state of a parameter's size."""


def is_adam(name: str, options: Mapping[str, Any]) -> bool:
    """Whether a class with these arguments keeps two moments; amsgrad keeps a third state."""
    return bool(_ADAM.fullmatch(name)) and not options.get("amsgrad")


@dataclass(frozen=True)
class ShardedModel:
    """One model of a job on FSDP or DTensor.

    Attributes:
        world: number of GPUs; of one stage, if there are several.
        dtype: canonical name of the dtype in which the parameters are stored.
        stages: the parts of the model in the stages of a pipeline; empty without one.
        shards: number of ranks that share a copy of a parameter; 0 to compute it from ``replicas``.
        tensor: size of tensor parallelism.
        context: number of context-parallel ranks; parameters are sharded over these ranks as well.
        replicas: number of copies of each parameter; determines the shards if ``shards`` is 0.
        compute: dtype of the parameters while a layer computes.
        reduce: dtype in which FSDP reduces the gradients over the data-parallel ranks; or empty.
        optimizer: class name of the optimizer, with the module unless the framework chooses among
            torch's; empty for a model that is not trained.
        options: the optimizer's keyword arguments.
        moments: dtype of both moments; empty if it is that of the parameters.
        adapters: dtype of trained LoRA adapters; empty if it is ``dtype``.
        lr: learning rate; 0 if small updates are not lost, as with stochastic rounding.
        offload: whether parameters, gradients and states are in the host's memory.
        value_head: whether the output layer is a value head with one output.
        keys: maps names of these attributes to config keys, for messages; ``dtype`` to the key with
            the value fp32; ``options`` only where the framework passes them to torch's optimizer.
        wrote: the dtypes that the user wrote.
        illegal: problems that the adapter found.
        notes: remarks about legal settings.
        ends: why the job ends without the shim; empty if it does not.
    """

    subject: str
    model: Model
    world: int
    dtype: str
    stages: tuple[Model, ...] = ()
    shards: int = 0
    tensor: int = 1
    context: int = 1
    replicas: int = 1
    compute: str = "bf16"
    reduce: str = "fp32"
    optimizer: str = "AdamW"
    options: Mapping[str, Any] = field(default_factory=dict)
    moments: str = ""
    adapters: str = ""
    lr: float = 0.0
    offload: bool = False
    value_head: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    decisions: tuple[Decided, ...] = ()
    wrote: Sequence[Written] = ()
    illegal: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    ends: str = ""
    on_megatron: ClassVar[bool] = False

    def plan(self, job: Job, rules: Rules) -> tuple[ModelPlan | None, list[Problem]]:
        """See ``Plannable``.

        Raises:
            PlanError: the optimizer's states are not known, or the GPUs cannot be grouped.
        """
        name, key = self.optimizer, self.keys.get("optimizer", "optimizer")
        if name and not is_adam(name, self.options):
            raise PlanError(
                f"{self.subject}: {key}={name!r}: its states are not known here, and may be larger "
                "than AdamW's. Planned are only jobs with torch's Adam and AdamW, without amsgrad."
            )
        sizes = Sizes(self.world, tensor=self.tensor, context=self.context, keys=self.keys)
        fault = layout.fault(sizes, self.model, heads_are_shared=False) or self._fault()
        if fault:
            raise PlanError(
                f"{self.subject}: its layout cannot be computed: {fault}. "
                "Write sizes that divide it."
            )
        parts = self.stages or (self.model,)
        stages = tuple(Stage(place, (self._part(one, sizes),)) for place, one in enumerate(parts))
        replicas = self.world // (self.group * self.tensor)
        ways = {"fsdp": self.group, "replicas": replicas, "tp": self.tensor}
        planned = ModelPlan(
            self.subject,
            self.model.parameters,
            ways if len(parts) == 1 else {**ways, "pp": len(parts)},
            self.decisions,
            stages,
            stages,
            (*self.notes, *self._tensor_parallel(), *filter(None, [self.model.note])),
            self.model.source,
            self.compute,
            self.reduce if name else "",
            self._warnings(),
            ends=self.ends,
        )
        return planned, [*self.illegal, *self._not_taken()]

    def _part(self, model: Model, sizes: Sizes) -> PlannedPart:
        """The memory of the model or of the part of it in a pipeline stage."""
        (counted,) = layout.count(model, sizes, value_head=self.value_head)
        group, dtype, numel = self.group, self.trained, (counted.dense, counted.frozen)
        moments = self.moments or dtype
        precision = Precision(dtype, dtype, "", moments, moments, buckets=False, frozen=self.dtype)
        if not self.optimizer:
            precision, numel = Precision(self.dtype, buckets=False), (0, sum(numel))
        share = Share(*numel, group, self.world // group, group > 1, group > 1)
        whole = part("model", share, precision, self.optimizer)
        if self.offload:
            held = {key: replace(size, host=size.bytes) for key, size in whole.components.items()}
            whole = replace(whole, components=held, at_step={})
        return whole

    def _not_taken(self) -> Iterator[Problem]:
        """Yield a problem for each option that the framework passes to torch, and torch refuses."""
        name, place = self.optimizer.rpartition(".")[2], self.keys.get("options")
        kind: Any = getattr(torch.optim, name, None) if place else None
        for key in self.options if kind is not None else ():
            if key not in inspect.signature(kind).parameters:
                fault = f"torch's {name}, which gets it, has no such argument"
                remedy = f"Leave {place}.{key} out."
                yield Problem("key", self.subject, f"{place}.{key}", fault, remedy)

    def _warnings(self) -> tuple[str, ...]:
        if not (self.optimizer and self.lr) or self.trained == "fp32":
            return ()
        lost, most = without_masters(self.lr, self.trained)
        remedy = f"There are no fp32 masters: {self.keys['dtype']} keeps the parameters in fp32"
        return (f"{lost}. {remedy}",) if most else ()

    def _tensor_parallel(self) -> Iterator[str]:
        if self.optimizer and self.tensor > 1 and self.reduce not in ("", self.compute):
            yield (
                "gradients of parameters that tensor parallelism does not split, such as norms, "
                f"are summed over its {self.tensor} ranks in {self.compute}, before FSDP reduces "
                f"them in {self.reduce}"
            )

    def variants(self, job: Job, rules: Rules) -> Sequence[Variant]:
        """Return nothing, because the shim has no cheaper settings for torch's optimizers."""
        return ()

    @property
    def trained(self) -> str:
        """The dtype in which the trained parameters are stored."""
        return self.adapters or self.dtype

    @property
    def group(self) -> int:
        """Number of ranks that share a copy of a parameter."""
        most = max(self.world // max(self.tensor * self.replicas, 1), 1)
        return self.shards if 0 < self.shards < most else most

    def _fault(self) -> str:
        """Why the GPUs cannot be grouped, with the config's key; empty if they can."""
        copies = self.tensor * self.context * self.replicas
        if copies > 0 and not (self.world % copies or self.world % (self.tensor * self.group)):
            return ""
        return (
            f"{self.world} GPUs ({self.keys.get('world', 'world')}) are no multiple of tensor "
            f"{self.tensor} x context {self.context} x replicas {self.replicas}, or of tensor x "
            f"{self.group} shards"
        )


UNSCALED = "nothing scales the fp16 loss, and small gradients become zero"


def learning_rate(options: Mapping[str, Any]) -> float:
    """The ``lr`` of an optimizer's options; 0 if it is no number, or if rounding is stochastic."""
    lr: Any = options.get("lr")
    known = isinstance(lr, int | float) and 0 < lr < 1
    return float(lr) if known and not options.get("bf16_stochastic_round") else 0.0


def scaling(
    job: Job,
    compute: str,
    group: str,
    because: str,
    *,
    configured: Callable[[], Mapping[str, Any]] = dict,
    framework_default: ScalerSettings | None = None,
    scales_itself: bool = False,
) -> tuple[Decided, ...]:
    """The shim's decision to scale a trained model's loss; empty if the shim does not scale losses.

    ``compute`` is the parameters' dtype in a layer, ``group`` the group of the seams that would
    scale, and ``because`` the reason that the worker would report. ``configured`` reads the
    framework's scaler block; see ``settings_for``, also for ``framework_default``.
    ``scales_itself``: the framework has a scaler of its own.
    """
    if compute != "fp16" or not job.in_force(FEATURE, group):
        return ()
    made = settings_for(configured(), framework_default, job.settings)
    return (Decided(FEATURE, chosen(made), because, "" if scales_itself else UNSCALED),)
