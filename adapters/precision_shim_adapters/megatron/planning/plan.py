"""What Megatron's models cost: from a framework's wishes to bytes, by the rules of run time.

An adapter reads its framework's config into ``Asked``. ``wishes.plan`` decides what the optimizer's
config becomes, ``deciding.bucket`` what the gradient bucket does, ``reader.wanted`` which dtypes
Megatron then keeps: the functions that decide and audit in a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from precision_shim.adapting import Settings, look
from precision_shim.errors import DtypeError, PlanError
from precision_shim.planning.command import Job
from precision_shim.planning.counting import Precision, Share, part, ring
from precision_shim.planning.record import (
    Decided,
    ModelPlan,
    Part,
    Problem,
    Stage,
    staying,
    unknown_keys,
)
from precision_shim.planning.request import Rules, Variant
from precision_shim.planning.shapes import Model
from precision_shim.planning.text import parked
from precision_shim.precision.dtypes import name_of
from precision_shim.precision.model import TrainableDtypes
from precision_shim_adapters.megatron.deciding.bucket import BucketChoice, choose_bucket
from precision_shim_adapters.megatron.deciding.legality import (
    CAPTURABLE_BF16_SINCE,
    NEWEST,
    REMAINDERS_SINCE,
    FusedAdamSupport,
    not_precision_aware,
    release,
)

from ..deciding.scaler import foreseen, unscaled
from ..deciding.wishes import (
    ALIGNMENT,
    DISPATCH,
    GROUP,
    PRECISION_AWARE,
    SCALING,
    InForce,
    Planned,
    Wishes,
    plan,
    what_is_in_force,
)
from ..reading import reader
from . import layout
from .layout import StageCount
from .sizes import Sizes

_ADAM = ("adam", "adamw")
_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
CONFIG = "megatron.core.optimizer.optimizer_config:OptimizerConfig"
DDP = "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig"
_LOW = ("main_grads_dtype", "main_params_dtype", *_MOMENTS)


@dataclass(frozen=True)
class Asked:
    """One model of a job on Megatron.

    Attributes:
        wishes: what the framework's config says.
        model: names and shapes.
        sizes: the groups.
        dtype: of the parameters.
        bucket_in_fp32: ``grad_reduce_in_fp32`` as the framework itself leaves it.
        frozen: whether a parameter is not trained, by its name.
        value_head: whether the output layer is one value.
        key: where the config has a field of the optimizer, for messages; ``{}`` is the field.
        bucket_key: where it has the bucket's.
        prefix: what stands before a key that is set on the command line.
        parked: the config's keys to the components that they move to the host between phases.
        place: models of one place share their GPUs.
        bucket_keys: the keys of Megatron's DistributedDataParallelConfig that the user wrote.
        illegal: what the adapter found.
        notes: what is legal and worth knowing.
    """

    wishes: Wishes
    model: Model
    sizes: Sizes
    dtype: torch.dtype
    bucket_in_fp32: bool = True
    frozen: Callable[[str], bool] = lambda name: False
    value_head: bool = False
    key: str = "{}"
    bucket_key: str = "grad_reduce_in_fp32"
    prefix: str = ""
    parked: Mapping[str, Sequence[str]] = field(default_factory=dict)
    place: str = ""
    bucket_keys: Collection[str] = ()
    illegal: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """Which model."""
        return self.wishes.subject

    def plan(self, job: Job, rules: Rules) -> tuple[ModelPlan | None, list[Problem]]:
        """See ``Plannable``."""
        core = release(rules.megatron_core) if rules.megatron_core else None
        return plan_model(
            self,
            job.settings,
            support_of(rules.transformer_engine),
            holds=job.in_force,
            megatron=core or None,
        )

    def on(self, world: int) -> Asked:
        """See ``Plannable``."""
        return replace(self, sizes=replace(self.sizes, world=world))

    def variants(self, job: Job, rules: Rules) -> Sequence[Variant]:
        """See ``Plannable``."""
        from .cheaper import variants  # which builds on this module

        return variants(self, job.settings, support_of(rules.transformer_engine), job.in_force)


@dataclass(frozen=True)
class Side:
    """A model's optimizer with the shim or without.

    Attributes:
        fields: of Megatron's OptimizerConfig.
        bucket: the gradient bucket.
        planned: the plan behind the fields.
    """

    fields: Mapping[str, Any]
    bucket: BucketChoice
    planned: Planned


# -- what is decided -------------------------------------------------------------------------------


def support_of(version: str | None) -> FusedAdamSupport:
    """What TransformerEngine's FusedAdam can do; without a version the newest known rules hold."""
    if version is None:
        return NEWEST
    found = release(version)
    # Megatron asks for the arguments that came with 1.13 or so; bf16 moments are a rule of their
    # own.
    return FusedAdamSupport(found, True, "") if found else NEWEST


def without_shim(support: FusedAdamSupport) -> InForce:
    """What is in force where the shim is off. Names of dtypes are read all the same."""
    return InForce("as-configured", True, False, False, False, False, support)


Holds = Callable[[str, str], bool]
"""Tells whether a feature is in force, as far as one group of seams goes."""


def with_shim(settings: Settings, support: FusedAdamSupport, holds: Holds) -> InForce:
    """What is in force where the shim is on. Names of dtypes are read all the same."""
    return replace(what_is_in_force(settings, holds, support), coerces=True)


def side(asked: Asked, now: InForce) -> Side:
    """Decide what the optimizer's config and the bucket become.

    Raises:
        DtypeError: the user wrote a name that is unknown or a dtype that is not legal.
    """
    model = TrainableDtypes({asked.dtype: max(asked.model.parameters, 1)})
    wishes = asked.wishes
    planned = plan(wishes, model, now, distributed=wishes.distributed)
    written = wishes.bucket_in_fp32 is not None
    present = bool(wishes.bucket_in_fp32) if written else asked.bucket_in_fp32
    choice = BucketChoice(present, False, "as it stands")
    if now.aligns:
        choice = choose_bucket(
            present=present,
            user_set=written,
            align=now.over_user,
            main_grads=planned.plan.main_grads,
            model=model,
        )
    return Side({**planned.added, **planned.asked}, choice, planned)


def precision(asked: Asked, one: Side, support: FusedAdamSupport) -> Precision:
    """The dtypes that Megatron keeps with these fields."""
    dtype, fields = asked.dtype, dict(one.fields)
    fields.update(bf16=dtype is torch.bfloat16, fp16=dtype is torch.float16, params_dtype=dtype)
    if (support.version or ()) < REMAINDERS_SINCE:
        fields["store_param_remainders"] = False
    wanted = reader.wanted(SimpleNamespace(**fields))
    aware = bool(fields.get(PRECISION_AWARE))
    bucket = torch.float32 if one.bucket.grad_reduce_in_fp32 else dtype
    master = wanted.masters.get(dtype)
    moments = {
        "exp_avg": wanted.exp_avg or torch.float32,
        "exp_avg_sq": wanted.exp_avg_sq or torch.float32,
    }
    offloaded = 0.0
    if fields.get("optimizer_cpu_offload"):
        offloaded = float(fields.get("optimizer_offload_fraction", 0.0) or 0.0)
        moments = dict.fromkeys(moments, torch.float32)
    return Precision(
        params=name_of(dtype),
        gradients=name_of(bucket),
        master="" if master is None else name_of(master),
        exp_avg=name_of(moments["exp_avg"]),
        exp_avg_sq=name_of(moments["exp_avg_sq"]),
        copies=dtype is not torch.float32 and bucket is not torch.float32 and not aware,
        unpacks=_unpacked(moments, support) if aware else (),
        offloaded=min(max(offloaded, 0.0), 1.0),
        offload_keeps_master=not aware,
    )


def _unpacked(moments: Mapping[str, torch.dtype], support: FusedAdamSupport) -> tuple[str, ...]:
    """Moments that FusedAdam unpacks to fp32 for its kernel, all parameters of a group at once."""
    if set(moments.values()) == {torch.bfloat16}:
        version = support.version
        if version is None or version >= CAPTURABLE_BF16_SINCE:
            return ()
    return tuple(name for name, dtype in moments.items() if dtype is not torch.float32)


# -- what is illegal -------------------------------------------------------------------------------


def problems_of(asked: Asked, one: Side, support: FusedAdamSupport) -> list[Problem]:
    """What Megatron refuses of an optimizer's config and its bucket.

    Raises:
        PlanError: the optimizer is not Adam.
    """
    fields, found = one.fields, []
    subject = asked.wishes.subject

    def report(code: str, field: str, message: str, remedy: str) -> None:
        key = asked.bucket_key if field == "grad_reduce_in_fp32" else asked.key.format(field)
        found.append(Problem(code, subject, key, message, remedy))

    aware = bool(fields.get(PRECISION_AWARE))
    _refuse_others(asked, fields)
    if aware and not fields.get("use_distributed_optimizer", asked.wishes.distributed):
        report(
            "precision-aware",
            PRECISION_AWARE,
            "it needs the distributed optimizer",
            "Write use_distributed_optimizer: true, or leave it out.",
        )
    if aware and support.problem:
        report("precision-aware", PRECISION_AWARE, support.problem, "Leave it out.")
    for name, message, remedy in not_precision_aware(fields):
        report("dtype", name, message, remedy)
    narrow = asked.dtype is torch.float16 and not one.bucket.grad_reduce_in_fp32
    if aware and narrow and fields.get("clip_grad", 1.0):
        report(
            "fp16-gradients",
            "grad_reduce_in_fp32",
            "fp16 gradients cannot be clipped by the precision-aware optimizer",
            "Write grad_reduce_in_fp32: true, or clip_grad: 0.",
        )
    return found


def _refuse_others(asked: Asked, fields: Mapping[str, Any]) -> None:
    name = str(fields.get("optimizer", asked.wishes.optimizer))
    if name not in _ADAM:
        raise PlanError(
            f"{asked.wishes.where}: {asked.subject}: optimizer={name!r}: its states are not known "
            "here; planned are those of adam. Plan the job with adam for an upper bound."
        )


def _unknown(asked: Asked) -> list[Problem]:
    """Keys that become arguments of Megatron's configs, and that these do not have."""
    subject = asked.wishes.subject
    found = unknown_keys(
        asked.wishes.asked, fields_of(CONFIG), subject, asked.key, "Megatron's OptimizerConfig"
    )
    if asked.bucket_keys:
        key = asked.bucket_key.rpartition(".")[0] + ".{}"
        whose = "Megatron's DistributedDataParallelConfig"
        found += unknown_keys(asked.bucket_keys, fields_of(DDP), subject, key, whose)
    return found


def _no_names(asked: Asked) -> list[Problem]:
    """Numbers and the like where Megatron takes a dtype: YAML makes a number of ``16``."""
    return [
        Problem(
            "dtype",
            asked.wishes.subject,
            asked.key.format(name),
            f"{asked.wishes.where}: {name}={value!r} is no name of a dtype",
            "Write a name, such as fp32 or bf16.",
        )
        for name, value in asked.wishes.asked.items()
        if name in _LOW and value is not None and not isinstance(value, str | torch.dtype)
    ]


def fields_of(target: str) -> tuple[str, ...]:
    """The fields of a dataclass of Megatron's; none where Megatron is not installed."""
    return look(f"{target}.__init__").parameters


# -- bytes -----------------------------------------------------------------------------------------


def plan_model(
    asked: Asked,
    settings: Settings,
    support: FusedAdamSupport,
    *,
    holds: Holds,
    megatron: tuple[int, ...] | None = None,
) -> tuple[ModelPlan | None, list[Problem]]:
    """Plan a model; ``None`` where what is illegal leaves nothing to count.

    Args:
        asked: the model.
        settings: the shim's.
        support: TransformerEngine's FusedAdam.
        holds: what is in force where the shim is on.
        megatron: megatron-core's release; ``None``: the newest known.
    """
    if not asked.wishes.trains:  # it has no optimizer, whatever its framework passes on
        asked = replace(asked, wishes=replace(asked.wishes, asked={}))
    subject = asked.wishes.subject
    found = [*asked.illegal, *layout.problems(asked.sizes, asked.model, subject, megatron)]
    found += _unknown(asked)
    numbers = _no_names(asked)
    if numbers:
        return None, [*found, *numbers]
    on = with_shim(settings, support, holds)
    try:
        sides = [side(asked, without_shim(support)), side(asked, on)]
    except DtypeError as error:
        key = asked.key.format(error.key or "dtype")
        return None, [*found, Problem.of(error, subject, key)]
    if asked.wishes.trains:
        found += problems_of(asked, sides[1], support)
    if any(one.code in ("size", "world-size", "layers") for one in found):
        return None, found
    counts = layout.count(
        asked.model,
        asked.sizes,
        frozen=asked.frozen,
        value_head=asked.value_head,
    )
    before, after = (stages(asked, one, counts, support) for one in sides)
    return (
        ModelPlan(
            subject,
            asked.model.parameters,
            asked.sizes.to_dict(),
            tuple(_decisions(asked, sides[1], settings, holds)) if asked.wishes.trains else (),
            {"before": _traffic(before), "after": _traffic(after)},
            before,
            after,
            (*asked.notes, *_notes(asked, sides[1]), *parked(after, asked.parked)),
            asked.model.source,
            _stays(asked, before, after),
            asked.place,
            name_of(asked.dtype),
        ),
        found,
    )


def stages(
    asked: Asked, one: Side, counts: list[StageCount], support: FusedAdamSupport
) -> tuple[Stage, ...]:
    """What a GPU of each pipeline stage holds."""
    wishes, sizes = asked.wishes, asked.sizes
    made = precision(asked, one, support)
    if not wishes.trains:
        made = Precision(made.params)
    distributed = bool(one.fields.get("use_distributed_optimizer", wishes.distributed))
    name = str(one.fields.get("optimizer", wishes.optimizer)) if wishes.trains else ""
    found = []
    for number, count in enumerate(counts):
        every = count.dense + count.experts + count.frozen
        dense = Share(
            count.dense if wishes.trains else 0,
            count.frozen if wishes.trains else every,
            group=sizes.shared_by,
            groups=sizes.tensor,
            states_sharded=distributed,
        )
        apart = count.experts and wishes.trains
        parts = [part("dense" if apart else "model", dense, made, name)]
        if apart:
            experts = Share(
                count.experts,
                group=sizes.experts_shared_by,
                groups=sizes.experts_tensor * sizes.expert,
                states_sharded=distributed,
            )
            parts.append(part("experts", experts, made, name))
        found.append(Stage(number, tuple(parts)))
    return tuple(found)


def _stays(asked: Asked, before: tuple[Stage, ...], after: tuple[Stage, ...]) -> dict[str, int]:
    moved = [name for components in asked.parked.values() for name in components]
    return {"before": staying(before, moved), "after": staying(after, moved)}


def _traffic(stages_: tuple[Stage, ...]) -> dict[str, int]:
    """Gradients once around their groups, and parameters once, in the stage with the most."""
    sums = [
        {
            "reduce_scatter": sum(ring(one, "grad_buckets") for one in stage.parts),
            "all_gather": sum(ring(one, _gathered(one)) for one in stage.parts if one.optimizer),
        }
        for stage in stages_
    ]
    return max(sums, key=lambda one: sum(one.values()))


def _gathered(part_: Part) -> str:
    """What goes around in full: without shared states the reduced gradients themselves do."""
    shared = any(part_.components[name].sharded for name in part_.components.keys() & {"exp_avg"})
    return "params" if shared else "grad_buckets"


def _decisions(asked: Asked, one: Side, settings: Settings, holds: Holds) -> list[Decided]:
    found = []
    made = one.planned.plan
    if holds(DISPATCH, GROUP):
        found.append(Decided(DISPATCH, made.chosen, made.because))
    if holds(ALIGNMENT, GROUP):
        in_fp32 = one.bucket.grad_reduce_in_fp32
        dtype = "fp32" if in_fp32 else name_of(asked.dtype)
        chosen = f"gradient bucket {dtype} (grad_reduce_in_fp32={in_fp32})"
        found.append(Decided(ALIGNMENT, chosen, one.bucket.because))
    if holds(SCALING, GROUP) and asked.dtype is torch.float16:
        scaler = foreseen(asked.wishes, one.planned.asked, settings)
        if scaler is not None:
            fp16 = _fp16(one)
            off = "no loss scaling", f"the optimizer's config has fp16={fp16}"
            found.append(Decided(SCALING, *(scaler if fp16 else off)))
    return found


def _fp16(one: Side) -> bool:
    """The ``fp16`` of an fp16 model's OptimizerConfig: Megatron makes a scaler by it."""
    return bool(one.fields.get("fp16", True))


def _notes(asked: Asked, one: Side) -> list[str]:
    found = []
    if asked.wishes.trains:
        made = one.planned.plan
        found += [*made.warnings, *(text for text in (made.bucket_warning,) if text)]
        if one.bucket.problem:
            found.append(one.bucket.problem)
        static = one.fields.get("loss_scale")
        if asked.dtype is torch.float16 and not (_fp16(one) or static):
            found.append(unscaled(asked.wishes.where, False, bool(one.fields.get("bf16"))))
    if asked.wishes.asked and not fields_of(CONFIG):
        found.append(
            "not checked: whether Megatron's OptimizerConfig has the fields that are written; "
            "megatron-core is not installed here"
        )
    further = asked.model.number("num_nextn_predict_layers", "mtp_num_hidden_layers")
    if further:
        found.append(
            f"not counted: {further} of the layers that predict further tokens, which the "
            "framework may build in the last stage"
        )
    lacking = layout.unknown(asked.model)
    if lacking and asked.sizes.tensor > 1:
        found.append(f"counted whole on each GPU, not known how they split: {', '.join(lacking)}")
    return found
