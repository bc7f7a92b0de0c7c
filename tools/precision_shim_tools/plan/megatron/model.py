"""Compute a model's bytes on Megatron from a framework's config, with the training job's rules.

An adapter reads its framework's config into a ``MegatronModel``. A plan calls the same functions as
a training process: ``plan_optimizer`` decides the optimizer's config, ``choose_bucket`` the
gradient bucket, and ``reader.read_wanted`` returns the dtypes of the tensors that Megatron
makes. The module ``layout`` splits the model over the GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from precision_shim.adapting import Settings, look
from precision_shim.errors import DtypeError, PlanError, SettingsError
from precision_shim.precision.dtypes import name_of
from precision_shim.precision.model import TrainableDtypes
from precision_shim.reporting.problem import Problem
from precision_shim_adapters.megatron.audit import reader
from precision_shim_adapters.megatron.policy.bucket import BucketChoice, choose_bucket
from precision_shim_adapters.megatron.policy.legality import (
    NEWEST,
    REMAINDERS_SINCE,
    FusedAdamSupport,
    not_precision_aware,
    release,
)
from precision_shim_adapters.megatron.policy.numbers import BETA2, SCALER, STATIC, check_numbers
from precision_shim_adapters.megatron.policy.optimizer_plan import (
    MEGATRON_BETA2,
    PRECISION_AWARE_FIELDS,
    OptimizerPlan,
    plan_optimizer,
)
from precision_shim_adapters.megatron.policy.requested import (
    ALIGNMENT,
    COERCION,
    DISPATCH,
    GROUP,
    PRECISION_AWARE,
    SCALING,
    InForce,
    RequestedConfig,
    what_is_in_force,
)
from precision_shim_adapters.megatron.policy.scaler import (
    predicted_own_scaler,
    predicted_scaler,
    refuse_low,
    unscaled,
)

from ..command import Job
from ..counting import Precision, Share, part
from ..record import Decided, ModelPlan, Stage, unknown_keys
from ..request import Rules, Variant
from ..shapes import Model
from . import cheaper, layout
from .layout import StageCount
from .sizes import Sizes

CONFIG = "megatron.core.optimizer.optimizer_config:OptimizerConfig"
DDP = "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig"
SHARED_HEADS_SINCE = (0, 16)
"""The first megatron-core release in which several ranks may share a key-value head."""

_BUCKET = "grad_reduce_in_fp32"
_OFFLOAD = "optimizer_cpu_offload"
_DTYPES = (*PRECISION_AWARE_FIELDS[1:], "main_params_dtype")

Holds = Callable[[str, str], bool]
"""Function that returns whether a feature is in force for a group of seams."""


@dataclass(frozen=True)
class MegatronModel:
    """One model of a job on Megatron, ready to be planned.

    Attributes:
        requested: the settings in the framework's config.
        model: names and shapes.
        sizes: the sizes of the parallel groups.
        dtype: the parameters' dtype.
        bucket_in_fp32: the framework's own value of ``grad_reduce_in_fp32``.
        frozen: function that returns whether the parameter with a given name is frozen.
        value_head: whether the output layer is a value head with one output.
        key: the config's key of an optimizer field, for messages; ``{}`` stands for the field.
        bucket_key: the config's key of ``grad_reduce_in_fp32``.
        prefix: the prefix of a key that is set on the command line, such as ``"++"``.
        bucket_keys: the keys of Megatron's DistributedDataParallelConfig that the user wrote.
        illegal: problems that the adapter found.
        notes: remarks about legal settings.
        takes_name: function that returns whether the framework accepts and converts a dtype name;
            ``None`` if the framework passes all dtype names to Megatron.
    """

    requested: RequestedConfig
    model: Model
    sizes: Sizes
    dtype: torch.dtype
    bucket_in_fp32: bool = True
    frozen: Callable[[str], bool] = lambda name: False
    value_head: bool = False
    key: str = "{}"
    bucket_key: str = _BUCKET
    prefix: str = ""
    bucket_keys: Collection[str] = ()
    illegal: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    takes_name: Callable[[str], bool] | None = None

    @property
    def subject(self) -> str:
        """The model's name."""
        return self.requested.subject

    def key_of(self, name: str) -> str:
        """The config's key of an optimizer field or of ``grad_reduce_in_fp32``."""
        return self.bucket_key if name == _BUCKET else self.key.format(name)

    def changed(self, **fields: Any) -> MegatronModel:
        """Copy the model with other fields of the optimizer's config, as if the user wrote them."""
        bucket = fields.pop(_BUCKET, self.requested.bucket_in_fp32)
        written = {**self.requested.asked, **fields}
        return replace(
            self, requested=replace(self.requested, asked=written, bucket_in_fp32=bucket)
        )

    def plan(self, job: Job, rules: Rules) -> tuple[ModelPlan | None, list[Problem]]:
        """See ``Plannable``."""
        core = release(rules.megatron_core) if rules.megatron_core else None
        support = support_of(rules.transformer_engine)
        return plan_model(self, job.settings, support, holds=job.in_force, megatron=core or None)

    def variants(self, job: Job, rules: Rules) -> Sequence[Variant]:
        """See ``Plannable``."""
        support = support_of(rules.transformer_engine)
        now = with_shim(job.settings, support, job.in_force)
        beta2 = float(self.requested.asked.get(BETA2, MEGATRON_BETA2))
        found = []
        for gives_up, fields in cheaper.steps(self.dtype, beta2, support):
            other = self.changed(**fields)
            try:
                illegal = problems_of(other, decide(other, now), support, holds=job.in_force)
            except DtypeError:
                continue
            if self.requested.trains and not illegal:
                lines = tuple(self._line(*item) for item in fields.items())
                found.append(Variant(gives_up, lines, other))
        return found

    def _line(self, name: str, value: object) -> str:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return f"{self.prefix}{self.key_of(name)}={text}"


@dataclass(frozen=True)
class Side:
    """A model's optimizer and bucket, either with the shim or without.

    Attributes:
        plan: the plan of the optimizer.
        bucket: the gradient bucket.
    """

    plan: OptimizerPlan
    bucket: BucketChoice

    @property
    def fields(self) -> Mapping[str, Any]:
        """The fields of Megatron's OptimizerConfig."""
        return self.plan.fields

    @property
    def fp16(self) -> bool:
        """Whether an fp16 model's config has ``fp16=True``, so that Megatron scales the loss."""
        return bool(self.fields.get("fp16", True))


def plan_model(
    asked: MegatronModel,
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

    Raises:
        PlanError: the model cannot be split over the GPUs, or its optimizer is not Adam.
    """
    shared = megatron is None or megatron >= SHARED_HEADS_SINCE
    fault = layout.fault(asked.sizes, asked.model, heads_are_shared=shared)
    if fault:
        raise PlanError(
            f"{asked.requested.where}: {asked.subject}: its layout cannot be computed: {fault}. "
            "Write sizes that divide it."
        )
    if not asked.requested.trains:  # a model that is not trained has no optimizer
        asked = replace(asked, requested=replace(asked.requested, asked={}))
    problems = [*asked.illegal, *_unknown(asked), *_no_names(asked)]
    if any(problem.code == "dtype" for problem in problems):
        return None, problems
    try:
        sides = [
            decide(asked, InForce("as-configured", True, False, False, False, False, support)),
            decide(asked, with_shim(settings, support, holds)),
        ]
        _check_numbers(asked, sides[1].plan.asked)
        decisions = tuple(_decisions(asked, sides[1], settings, holds))
    except DtypeError as error:
        key = asked.key_of(error.key or "dtype")
        return None, [*problems, Problem.of(error, asked.subject, key)]
    except SettingsError as error:
        key = asked.key.removesuffix(".{}")
        return None, [*problems, Problem.of(error, asked.subject, key, "number")]
    if asked.requested.trains:
        problems += problems_of(asked, sides[1], support, holds=holds)
    counts = layout.count(
        asked.model, asked.sizes, frozen=asked.frozen, value_head=asked.value_head
    )
    before, after = (_stages(asked, side, counts, support) for side in sides)
    return (
        ModelPlan(
            asked.subject,
            asked.model.parameters,
            asked.sizes.to_dict(),
            decisions,
            before,
            after,
            (*asked.notes, *_notes(asked, sides[1])),
            asked.model.source,
            name_of(asked.dtype),
        ),
        problems,
    )


# -- what is in force ------------------------------------------------------------------------------


def support_of(version: str | None) -> FusedAdamSupport:
    """The capabilities of FusedAdam in a release of TransformerEngine, by default the newest."""
    known = release(version) if version is not None else ()
    # TransformerEngine from about 1.13 has the arguments that Megatron needs. Whether bf16 moments
    # are legal depends on the release (``FusedAdamSupport.bf16_moments``).
    return FusedAdamSupport(known, True, "") if known else NEWEST


def with_shim(settings: Settings, support: FusedAdamSupport, holds: Holds) -> InForce:
    """The ``InForce`` with the shim; ``coerces`` is true, because a plan parses dtype names.

    ``problems_of`` reports dtype names that neither the framework nor the shim turns into dtypes.
    """
    return replace(what_is_in_force(settings, holds, support), coerces=True)


def decide(asked: MegatronModel, now: InForce) -> Side:
    """Decide the optimizer's fields and the bucket.

    Raises:
        DtypeError: the user wrote an unknown dtype name or an illegal dtype.
        SettingsError: the user's ``adam_beta2`` is no number.
    """
    model = TrainableDtypes({asked.dtype: max(asked.model.parameters, 1)})
    requested = asked.requested
    plan = plan_optimizer(requested, model, now, distributed=requested.distributed)
    written = requested.bucket_in_fp32 is not None
    present = bool(requested.bucket_in_fp32) if written else asked.bucket_in_fp32
    choice = BucketChoice(present, "as it stands")
    if now.aligns:
        choice = choose_bucket(
            present=present,
            user_set=written,
            align=now.over_user,
            main_grads=plan.main_grads,
            model=model,
        )
    return Side(plan, choice)


# -- what is illegal -------------------------------------------------------------------------------


def fields_of(target: str) -> tuple[str, ...]:
    """The fields of one of Megatron's dataclasses; empty if Megatron is not installed."""
    return look(f"{target}.__init__").parameters


def _unknown(asked: MegatronModel) -> list[Problem]:
    """List the keys that the framework passes to Megatron's configs but that these configs lack."""
    key = asked.bucket_key.rpartition(".")[0] + ".{}"
    written, buckets = asked.requested.asked, asked.bucket_keys
    whose = "Megatron's OptimizerConfig"
    found = unknown_keys(written, fields_of(CONFIG), asked.subject, asked.key, whose)
    whose = "Megatron's DistributedDataParallelConfig"
    return found + unknown_keys(buckets, fields_of(DDP), asked.subject, key, whose)


def _no_names(asked: MegatronModel) -> Iterator[Problem]:
    """Yield values of dtype fields that are neither names nor dtypes, such as the number ``16``."""
    for name in _DTYPES:
        value = asked.requested.asked.get(name, "")
        # ``problems_of`` reports ``main_grads_dtype=None``, unless Megatron ignores the field.
        null = value is None and name == "main_grads_dtype"
        if not isinstance(value, str | torch.dtype) and not null:
            fault = f"{asked.requested.where}: {name}={value!r} is no name of a dtype"
            remedy = "Write a name, such as fp32 or bf16."
            yield Problem("dtype", asked.subject, asked.key_of(name), fault, remedy)


def _check_numbers(asked: MegatronModel, fields: Mapping[str, Any]) -> None:
    """Check the values that the worker checks, and the offloaded share.

    Raises:
        SettingsError: a value is no number, or the loss scaler cannot use it.
    """
    names: tuple[str, ...] = (STATIC,)
    names += ("optimizer_offload_fraction",) * bool(fields.get(_OFFLOAD))
    if (asked.dtype is torch.float16 or fields.get("fp16")) and not fields.get(STATIC):
        names += SCALER
    check_numbers(fields, names, asked.requested.where)


def problems_of(
    asked: MegatronModel, side: Side, support: FusedAdamSupport, *, holds: Holds
) -> list[Problem]:
    """List the settings of an optimizer and its bucket that Megatron refuses.

    Args:
        asked: the model.
        side: the model's optimizer and bucket, decided with the shim on.
        support: the capabilities of TransformerEngine's FusedAdam.
        holds: function that returns whether a feature is in force for a group of seams in the job.

    Raises:
        PlanError: the optimizer is not Adam.
    """
    fields, requested = side.fields, asked.requested
    problems: list[Problem] = []

    def report(code: str, name: str, message: str, remedy: str) -> None:
        problems.append(Problem(code, asked.subject, asked.key_of(name), message, remedy))

    optimizer = str(fields.get("optimizer", requested.optimizer))
    if optimizer != "adam":
        raise PlanError(
            f"{requested.where}: {asked.subject}: optimizer={optimizer!r}: its states are not known here; "
            "planned are those of adam. Plan the job with adam for an upper bound."
        )
    aware = bool(fields.get(PRECISION_AWARE))
    for name in () if holds(COERCION, GROUP) else _stay_names(asked):
        report(
            "dtype",
            name,
            f"{requested.where}: {name}={requested.asked[name]!r} is not turned into a dtype, as "
            f"{COERCION} is not in force for this job",
            f"Leave it out, or let the shim's {COERCION} act in the job.",
        )
    if aware and not fields.get("use_distributed_optimizer", requested.distributed):
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
    if not aware and fields.get("main_grads_dtype", asked.dtype) is None:
        report("dtype", "main_grads_dtype", "None is no dtype", "Write fp32, or leave it out.")
    narrow = asked.dtype is torch.float16 and not side.bucket.grad_reduce_in_fp32
    if aware and narrow and fields.get("clip_grad", 1.0):
        report(
            "fp16-gradients",
            _BUCKET,
            "fp16 gradients cannot be clipped by the precision-aware optimizer",
            "Write grad_reduce_in_fp32: true, or clip_grad: 0.",
        )
    return problems


def _stay_names(asked: MegatronModel) -> list[str]:
    """List the fields in which Megatron receives a dtype's name if the shim turns no name."""
    takes, written = asked.takes_name, asked.requested.asked
    # Megatron never reads main_grads_dtype of a precision-aware optimizer.
    unread = takes is None and asked.requested.precision_aware_by_itself
    return [
        name
        for name in _DTYPES[1 if unread else 0 :]
        if isinstance(written.get(name), str) and not (takes is not None and takes(written[name]))
    ]


# -- what a GPU holds ------------------------------------------------------------------------------


def _precision(asked: MegatronModel, side: Side, support: FusedAdamSupport) -> Precision:
    """The dtypes of the tensors that Megatron makes with the fields and the bucket of ``side``."""
    dtype, fields = asked.dtype, dict(side.fields)
    if not asked.requested.trains:
        return Precision(name_of(dtype))
    fields.update(bf16=dtype is torch.bfloat16, fp16=dtype is torch.float16, params_dtype=dtype)
    if (support.version or ()) < REMAINDERS_SINCE:
        fields["store_param_remainders"] = False
    wanted = reader.read_wanted(fields.get)
    aware = bool(fields.get(PRECISION_AWARE))
    bucket = torch.float32 if side.bucket.grad_reduce_in_fp32 else dtype
    master = wanted.masters.get(dtype)
    main = wanted.masters[torch.float16]
    if master is None and aware and reader.adam_keeps_masters(fields.get, main):
        # FusedAdam makes a master weight for an fp32 parameter, too, and never updates this master.
        master = main
    moments = [wanted.exp_avg or torch.float32, wanted.exp_avg_sq or torch.float32]
    offloaded = 0.0
    if fields.get(_OFFLOAD):
        offloaded = float(fields.get("optimizer_offload_fraction") or 0.0)
        moments = [torch.float32, torch.float32]
    return Precision(
        params=name_of(dtype),
        gradients=name_of(bucket),
        master="" if master is None else name_of(master),
        exp_avg=name_of(moments[0]),
        exp_avg_sq=name_of(moments[1]),
        copies=dtype is not torch.float32 and bucket is not torch.float32 and not aware,
        offloaded=min(max(offloaded, 0.0), 1.0),
        offload_keeps_master=not aware,
    )


def _stages(
    asked: MegatronModel, side: Side, counts: list[StageCount], support: FusedAdamSupport
) -> tuple[Stage, ...]:
    """The contents of a GPU's memory in each pipeline stage."""
    requested, sizes = asked.requested, asked.sizes
    made = _precision(asked, side, support)
    distributed = bool(side.fields.get("use_distributed_optimizer", requested.distributed))
    name = str(side.fields.get("optimizer", requested.optimizer)) if requested.trains else ""
    counted = []
    for number, count in enumerate(counts):
        shares = {"model": Share(count.dense, count.frozen, sizes.shared_by, sizes.tensor)}
        if not requested.trains:
            every = count.dense + count.experts + count.frozen
            shares = {"model": Share(0, every, sizes.shared_by, sizes.tensor)}
        elif count.experts:
            groups = sizes.experts_tensor * sizes.expert
            shares = {
                "dense": shares["model"],
                "experts": Share(count.experts, 0, sizes.experts_shared_by, groups),
            }
        parts = [
            part(key, replace(share, states_sharded=distributed), made, name)
            for key, share in shares.items()
        ]
        counted.append(Stage(number, tuple(parts)))
    return tuple(counted)


# -- what is told ----------------------------------------------------------------------------------


def _decisions(
    asked: MegatronModel, side: Side, settings: Settings, holds: Holds
) -> Iterator[Decided]:
    """Yield the shim's choices for a model that is trained.

    Raises:
        SettingsError: the loss scaler would begin below its minimum.
    """
    if not asked.requested.trains:
        return
    made = side.plan
    if holds(DISPATCH, GROUP):
        yield Decided(DISPATCH, made.chosen, made.because)
    if holds(ALIGNMENT, GROUP):
        in_fp32 = side.bucket.grad_reduce_in_fp32
        dtype = "fp32" if in_fp32 else name_of(asked.dtype)
        chosen = f"gradient bucket {dtype} (grad_reduce_in_fp32={in_fp32})"
        yield Decided(ALIGNMENT, chosen, side.bucket.because)
    scales = holds(SCALING, GROUP)
    if scales and asked.dtype is torch.float16:
        scaler = predicted_scaler(asked.requested, side.plan.asked, settings)
        off = "no loss scaling", "the optimizer's config has fp16=False"
        if scaler is not None:
            yield Decided(SCALING, *(scaler if side.fp16 else off))
    elif side.fields.get("fp16"):
        refuse_low(side.fields, asked.requested.where)
        alone = predicted_own_scaler(side.fields, settings, asked.dtype) if scales else None
        if alone is not None:
            yield Decided(SCALING, *alone)


def _notes(asked: MegatronModel, side: Side) -> Iterator[str]:
    if asked.requested.trains:
        made = side.plan
        yield from made.warnings
        yield from filter(None, (made.bucket_warning, side.bucket.problem))
        yield from _of_another_model(asked, side)
    if asked.requested.asked and not fields_of(CONFIG):
        yield (
            "not checked: whether Megatron's OptimizerConfig has the fields that are written; "
            "megatron-core is not installed here"
        )
    further = asked.model.number("num_nextn_predict_layers", "mtp_num_hidden_layers")
    if further:
        yield (
            f"not counted: {further} of the layers that predict further tokens, which the "
            "framework may build in the last stage"
        )


def _of_another_model(asked: MegatronModel, side: Side) -> Iterator[str]:
    """Yield notes if the user wrote an OptimizerConfig for parameters of another dtype."""
    fields, model = side.plan.asked, name_of(asked.dtype)
    flagged = torch.float16 if fields.get("fp16") else None
    if flagged is None and fields.get("bf16"):
        flagged = torch.bfloat16
    if flagged not in (None, asked.dtype):
        yield (
            f"expected {name_of(flagged)}, found {model}: the OptimizerConfig is for another "
            "model: set its bf16, fp16 and params_dtype to what the model is"
        )
    written = fields.get("params_dtype", asked.dtype)
    if "params_dtype" not in asked.requested.unchecked and written is not asked.dtype:
        yield (
            f"the OptimizerConfig is for {written and name_of(written)} parameters, the trainable "
            f"parameters are {model}"
        )
    if asked.dtype is torch.float16 and not (side.fp16 or side.fields.get(STATIC)):
        yield unscaled(asked.requested.where, False, bool(side.fields.get("bf16")))
