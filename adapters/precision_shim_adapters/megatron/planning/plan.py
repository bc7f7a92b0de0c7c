"""Compute a model's bytes on Megatron from a framework's config, with the training job's rules.

An adapter reads its framework's config into a ``MegatronModel``. The module ``decided`` decides the
model's settings, ``layout`` splits the model over the GPUs, and ``plan`` computes the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from precision_shim.adapting import Settings, look
from precision_shim.errors import DtypeError
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
from precision_shim.planning.text import list_parked
from precision_shim.precision.dtypes import name_of
from precision_shim_adapters.megatron.deciding.legality import (
    FusedAdamSupport,
    release,
)

from ..deciding.numbers import NUMBERS, SCALER, allowed, refused_numbers
from ..deciding.requested import (
    ALIGNMENT,
    DISPATCH,
    GROUP,
    SCALING,
)
from ..deciding.scaler import OWN_INITIAL, foreseen, foreseen_alone, refuse_low, unscaled
from . import layout
from .cheaper import variants
from .decided import (
    Asked,
    Holds,
    Side,
    precision,
    problems_of,
    side,
    support_of,
    with_shim,
    without_shim,
)
from .layout import StageCount

_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
CONFIG = "megatron.core.optimizer.optimizer_config:OptimizerConfig"
DDP = "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig"
_OFFLOAD = "optimizer_cpu_offload"
_LOW = ("main_grads_dtype", "main_params_dtype", *_MOMENTS)


@dataclass(frozen=True)
class MegatronModel(Asked):
    """One model of a job on Megatron, ready to be planned."""

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

    def on(self, world: int) -> MegatronModel:
        """See ``Plannable``."""
        return replace(self, sizes=replace(self.sizes, world=world))

    def variants(self, job: Job, rules: Rules) -> Sequence[Variant]:
        """See ``Plannable``."""
        support = support_of(rules.transformer_engine)
        return [
            Variant(gives_up, lines, other, self.one_line)
            for gives_up, lines, other in variants(self, job.settings, support, job.in_force)
        ]


def _unknown(asked: Asked) -> list[Problem]:
    """List the keys that the framework passes to Megatron's configs but that these configs lack."""
    subject = asked.wishes.subject
    keys = unknown_keys(
        asked.wishes.asked, fields_of(CONFIG), subject, asked.key, "Megatron's OptimizerConfig"
    )
    if asked.bucket_keys:
        key = asked.bucket_key.rpartition(".")[0] + ".{}"
        whose = "Megatron's DistributedDataParallelConfig"
        keys += unknown_keys(asked.bucket_keys, fields_of(DDP), subject, key, whose)
    return keys


def _no_names(asked: Asked) -> list[Problem]:
    """List values of dtype fields that are neither names nor dtypes, such as the number ``16``."""
    return [
        Problem(
            "dtype",
            asked.wishes.subject,
            asked.key_of(name),
            f"{asked.wishes.where}: {name}={value!r} is no name of a dtype",
            "Write a name, such as fp32 or bf16.",
        )
        for name, value in asked.wishes.asked.items()
        if name in _LOW
        and not isinstance(value, str | torch.dtype)
        # ``problems_of`` reports ``main_grads_dtype=None``, unless Megatron ignores the field.
        and not (value is None and name == "main_grads_dtype")
    ]


def _no_numbers(asked: Asked) -> list[Problem]:
    """List values that Adam or the loss scaler refuses, such as a string, null or 0."""
    written = asked.wishes.asked
    names: tuple[str, ...] = (*NUMBERS, "loss_scale")
    names += ("optimizer_offload_fraction",) * bool(written.get(_OFFLOAD))
    if asked.dtype is torch.float16 or written.get("fp16"):
        names += SCALER * (not written.get("loss_scale"))
    return [
        Problem(
            "number",
            asked.wishes.subject,
            asked.key_of(name),
            f"{asked.wishes.where}: {name}={written[name]!r} is not allowed",
            f"Write {allowed(name)}, without quotes.",
        )
        for name in refused_numbers(written, names)
    ]


def fields_of(target: str) -> tuple[str, ...]:
    """The fields of one of Megatron's dataclasses; empty if Megatron is not installed."""
    return look(f"{target}.__init__").parameters


def plan_model(
    asked: Asked,
    settings: Settings,
    support: FusedAdamSupport,
    *,
    holds: Holds,
    megatron: tuple[int, ...] | None = None,
) -> tuple[ModelPlan | None, list[Problem]]:
    """Plan a model; the plan is ``None`` if the config's problems prevent counting the bytes.

    Args:
        asked: the model.
        settings: the shim's settings.
        support: the capabilities of TransformerEngine's FusedAdam.
        holds: function that returns whether a feature is in force for a group of seams in the job.
        megatron: megatron-core's release; ``None`` for the newest known release.
    """
    if not asked.wishes.trains:  # a model that is not trained has no optimizer
        asked = replace(asked, wishes=replace(asked.wishes, asked={}))
    subject = asked.wishes.subject
    problems = [*asked.illegal, *layout.problems(asked.sizes, asked.model, subject, megatron)]
    problems += _unknown(asked)
    unreadable = [*_no_names(asked), *_no_numbers(asked)]
    if unreadable:
        return None, [*problems, *unreadable]
    on = with_shim(settings, support, holds)
    try:
        sides = [side(asked, without_shim(support)), side(asked, on)]
    except DtypeError as error:
        key = asked.key_of(error.key or "dtype")
        return None, [*problems, Problem.of(error, subject, key)]
    if asked.wishes.trains:
        problems += problems_of(asked, sides[1], support, holds=holds)
    if any(problem.code in ("size", "world-size", "layers") for problem in problems):
        return None, problems
    counts = layout.count(
        asked.model,
        asked.sizes,
        frozen=asked.frozen,
        value_head=asked.value_head,
    )
    before, after = (stages(asked, plan_side, counts, support) for plan_side in sides)
    return (
        ModelPlan(
            subject,
            asked.model.parameters,
            asked.sizes.to_dict(),
            tuple(_decisions(asked, sides[1], settings, holds)) if asked.wishes.trains else (),
            {"before": _traffic(before), "after": _traffic(after)},
            before,
            after,
            (*asked.notes, *_notes(asked, sides[1]), *list_parked(after, asked.parked)),
            asked.model.source,
            _stays(asked, before, after),
            asked.place,
            name_of(asked.dtype),
        ),
        problems,
    )


def stages(
    asked: Asked, plan_side: Side, counts: list[StageCount], support: FusedAdamSupport
) -> tuple[Stage, ...]:
    """The contents of a GPU's memory in each pipeline stage."""
    wishes, sizes = asked.wishes, asked.sizes
    made = precision(asked, plan_side, support)
    if not wishes.trains:
        made = Precision(made.params)
    distributed = bool(plan_side.fields.get("use_distributed_optimizer", wishes.distributed))
    name = str(plan_side.fields.get("optimizer", wishes.optimizer)) if wishes.trains else ""
    counted = []
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
        counted.append(Stage(number, tuple(parts)))
    return tuple(counted)


def _stays(asked: Asked, before: tuple[Stage, ...], after: tuple[Stage, ...]) -> dict[str, int]:
    moved = [name for components in asked.parked.values() for name in components]
    return {"before": staying(before, moved), "after": staying(after, moved)}


def _traffic(stages_: tuple[Stage, ...]) -> dict[str, int]:
    """Bytes per step of reduce-scatter and of all-gather in the stage that transfers most bytes."""
    sums = [
        {
            "reduce_scatter": sum(ring(part, "grad_buckets") for part in stage.parts),
            "all_gather": sum(
                ring(part, _name_gathered(part)) for part in stage.parts if part.optimizer
            ),
        }
        for stage in stages_
    ]
    return max(sums, key=lambda held: sum(held.values()))


def _name_gathered(part_: Part) -> str:
    """The component that is all-gathered: parameters, or gradients if states are not sharded."""
    shared = any(part_.components[name].sharded for name in part_.components.keys() & {"exp_avg"})
    return "params" if shared else "grad_buckets"


def _decisions(asked: Asked, side: Side, settings: Settings, holds: Holds) -> list[Decided]:
    decisions = []
    made = side.plan
    if holds(DISPATCH, GROUP):
        decisions.append(Decided(DISPATCH, made.chosen, made.because))
    if holds(ALIGNMENT, GROUP):
        in_fp32 = side.bucket.grad_reduce_in_fp32
        dtype = "fp32" if in_fp32 else name_of(asked.dtype)
        chosen = f"gradient bucket {dtype} (grad_reduce_in_fp32={in_fp32})"
        decisions.append(Decided(ALIGNMENT, chosen, side.bucket.because))
    scales, is_fp16 = holds(SCALING, GROUP), asked.dtype is torch.float16
    if side.fields.get("fp16") and not (scales and is_fp16):
        refuse_low(side.fields, asked.wishes.where)
        alone = foreseen_alone(side.fields, settings, asked.dtype) if scales else None
        decisions += [Decided(SCALING, *alone)] if alone is not None else []
    if scales and is_fp16:
        scaler = foreseen(asked.wishes, side.plan.asked, settings)
        if scaler is not None:
            fp16 = _fp16(side)
            off = "no loss scaling", f"the optimizer's config has fp16={fp16}"
            decisions.append(Decided(SCALING, *(scaler if fp16 else off)))
    return decisions


def _fp16(side: Side) -> bool:
    """Whether an fp16 model's config has ``fp16=True``, so that Megatron makes a loss scaler."""
    return bool(side.fields.get("fp16", True))


def _of_another_model(asked: Asked, side: Side) -> list[str]:
    """Return notes if the user wrote an OptimizerConfig for parameters of another dtype."""
    wishes, fields = asked.wishes, side.plan.asked
    flagged = torch.float16 if fields.get("fp16") else None
    if flagged is None and fields.get("bf16"):
        flagged = torch.bfloat16
    notes = []
    if flagged not in (None, asked.dtype):
        notes.append(
            f"expected {name_of(flagged)}, found {name_of(asked.dtype)}: the OptimizerConfig is "
            "for another model: set its bf16, fp16 and params_dtype to what the model is"
        )
    if flagged is torch.float16 and asked.dtype is not flagged and not fields.get("loss_scale"):
        first = fields.get("initial_loss_scale", OWN_INITIAL)
        notes.append(
            f"fp16=True: Megatron scales this {name_of(asked.dtype)} model's loss too, from "
            f"{first:.10g} (initial_loss_scale), with the shim and without it"
        )
    written = fields.get("params_dtype", asked.dtype)
    if "params_dtype" not in wishes.unchecked and written is not asked.dtype:
        notes.append(
            f"the OptimizerConfig is for {written and name_of(written)} parameters, the trainable "
            f"parameters are {name_of(asked.dtype)}"
        )
    return notes


def _notes(asked: Asked, side: Side) -> list[str]:
    notes = []
    if asked.wishes.trains:
        made = side.plan
        notes += [*made.warnings, *(text for text in (made.bucket_warning,) if text)]
        if side.bucket.problem:
            notes.append(side.bucket.problem)
        notes += _of_another_model(asked, side)
        static = side.fields.get("loss_scale")
        if asked.dtype is torch.float16 and not (_fp16(side) or static):
            notes.append(unscaled(asked.wishes.where, False, bool(side.fields.get("bf16"))))
    if asked.wishes.asked and not fields_of(CONFIG):
        notes.append(
            "not checked: whether Megatron's OptimizerConfig has the fields that are written; "
            "megatron-core is not installed here"
        )
    further = asked.model.number("num_nextn_predict_layers", "mtp_num_hidden_layers")
    if further:
        notes.append(
            f"not counted: {further} of the layers that predict further tokens, which the "
            "framework may build in the last stage"
        )
    lacking = layout.unknown(asked.model)
    if lacking and asked.sizes.tensor > 1:
        notes.append(f"counted whole on each GPU, not known how they split: {', '.join(lacking)}")
    return notes
