"""Compute a model's bytes on Megatron from a framework's config, with the training job's rules.

An adapter reads its framework's config into a ``MegatronModel``. A plan calls the worker's own
rules: ``plan_optimizer``, ``choose_bucket``, ``with_scaler``, ``cannot_train``, ``read_wanted``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, ClassVar

import torch

from precision_shim.adapting import look
from precision_shim.errors import DtypeError, PlanError, SettingsError
from precision_shim.precision.dtypes import name_of, parse_dtype, read_dtype
from precision_shim.precision.effect import Written
from precision_shim.precision.findings import Problem
from precision_shim.precision.formats import Format
from precision_shim.precision.model import TrainableDtypes
from precision_shim_adapters import megatron
from precision_shim_adapters.megatron.audit import reader
from precision_shim_adapters.megatron.installed import fsdp_heeds_bucket, needs_gather
from precision_shim_adapters.megatron.policy import legality, optimizer_plan, scaler
from precision_shim_adapters.megatron.policy.bucket import (
    SUMS,
    BucketChoice,
    choose_bucket,
    describe_bucket,
    fsdp_in_fp32,
)
from precision_shim_adapters.megatron.policy.formats import read_format
from precision_shim_adapters.megatron.policy.legality import BETA2, FusedAdamSupport, release
from precision_shim_adapters.megatron.policy.requested import COERCION, InForce, what_is_in_force
from precision_shim_adapters.megatron.training import config_dtypes

from ..command import Job
from ..counting import Precision, Share, part
from ..record import Decided, ModelPlan, Stage, unknown_keys
from ..request import Rules, Variant
from ..shapes import Model
from . import cheaper, layout, lora
from .sizes import Sizes

CONFIG = "megatron.core.optimizer.optimizer_config:OptimizerConfig"
DDP = "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig"
_LAYERS = (
    "megatron.core.model_parallel_config:ModelParallelConfig",
    "megatron.core.transformer.transformer_config:TransformerConfig",
    "megatron.core.transformer.transformer_config:MLATransformerConfig",
    "megatron.bridge.models.gpt_provider:GPTModelProvider",
)
SHARED_HEADS_SINCE = (0, 16)
"""The first megatron-core release in which several ranks may share a key-value head."""

_BUCKET = "grad_reduce_in_fp32"
_DTYPES = (*optimizer_plan.PRECISION_AWARE_FIELDS[1:], "main_params_dtype")


@dataclass(frozen=True)
class MegatronModel:
    """One model of a job on Megatron, ready to be planned.

    Attributes:
        requested: the settings in the framework's config.
        model: names and shapes.
        sizes: the sizes of the parallel groups.
        dtype: the parameters' dtype.
        bucket_in_fp32: the framework's value of ``grad_reduce_in_fp32``.
        frozen_routers: whether the routers of experts are not trained.
        value_head: whether the output layer is a value head with one output.
        key: the config's key of an optimizer field, for messages; ``{}`` stands for the field.
        bucket_key: the config's key of ``grad_reduce_in_fp32``.
        prefix: the prefix of a key that is set on the command line, such as ``"++"``.
        buckets: the fields of Megatron's DistributedDataParallelConfig that the user wrote.
        illegal: problems that the adapter found.
        notes: remarks about legal settings.
        takes_name: whether the framework converts a dtype name; ``None``: Megatron gets all names.
        quantized: ``"fp8"`` or ``"fp4"`` if the weights are stored so, see ``quantized_in``.
        layers: fields of Megatron's TransformerConfig that the user wrote.
        layers_key: the config's key of such a field; ``{}`` stands for the field.
        gathers: whether the DDP's config has ``fp8_param_gather`` or ``fp4_param_gather``.
        format: what the quantized layers compute in, if ``layers`` does not say it.
        unread: dtype keys of a model without an optimizer that may have no effect.
        unscaled: what goes wrong in fp16 without the shim.
        fsdp: with Megatron-FSDP, the user's ``megatron_fsdp_main_grads_dtype``, or ``""``.
        lora: Megatron-Bridge's arguments for LoRA adapters; empty without any.
        alone: what the framework itself refuses, without the shim.
    """

    requested: megatron.RequestedConfig
    model: Model
    sizes: Sizes
    dtype: torch.dtype
    bucket_in_fp32: bool = True
    frozen_routers: bool = False
    value_head: bool = False
    key: str = "{}"
    bucket_key: str = _BUCKET
    prefix: str = ""
    buckets: Mapping[str, Any] = field(default_factory=dict)
    illegal: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    takes_name: Callable[[str], bool] | None = None
    quantized: str = ""
    layers: Mapping[str, Any] = field(default_factory=dict)
    layers_key: str = "{}"
    gathers: bool = False
    format: Format | None = None
    unread: Sequence[Written] = ()
    unscaled: str = ""
    fsdp: str | None = None
    lora: Mapping[str, Any] = field(default_factory=dict)
    alone: tuple[Problem, ...] = ()
    on_megatron: ClassVar[bool] = True

    @property
    def subject(self) -> str:
        """The model's name."""
        return self.requested.subject

    @property
    def written(self) -> Mapping[str, Any]:
        """The optimizer fields that the user wrote; none if the model has no optimizer."""
        return self.requested.asked if self.requested.trains else {}

    @property
    def wrote(self) -> Sequence[Written]:
        """See ``Plannable``."""
        return (*self.requested.written(self.key, self.bucket_key), *self.unread)

    @property
    def _format(self) -> Format | None:
        return self.format or read_format(self.layers, self.layers_key)

    def key_of(self, name: str) -> str:
        """The config's key of a field of the optimizer or of the DDP."""
        ddp = name in (_BUCKET, SUMS, legality.GATHER)
        return self.bucket_key.replace(_BUCKET, name) if ddp else self.key.format(name)

    def changed(self, **fields: Any) -> MegatronModel:
        """Copy the model with other fields of the optimizer's config, as if the user wrote them."""
        bucket = fields.pop(_BUCKET, self.requested.bucket_in_fp32)
        written = {**self.requested.asked, **fields}
        return replace(
            self, requested=replace(self.requested, asked=written, bucket_in_fp32=bucket)
        )

    def plan(self, job: Job, rules: Rules) -> tuple[ModelPlan | None, list[Problem]]:
        """See ``Plannable``.

        Raises:
            PlanError: the model cannot be split over the GPUs, its optimizer is not Adam, or its
                quantized weights are not fp8 beside 16-bit ones.
        """
        if self.quantized and (self.quantized, self.dtype.itemsize) != ("fp8", 2):
            raise PlanError(
                f"{self.requested.where}: {self.subject}: {self.quantized} parameters in a "
                f"{name_of(self.dtype)} model: their size is not known here; planned are fp8 "
                "parameters in a 16-bit model. Plan the job without them."
            )
        core = release(rules.megatron_core or "")
        shared = not core or core >= SHARED_HEADS_SINCE
        fault = layout.fault(self.sizes, self.model, heads_are_shared=shared)
        if fault:
            raise PlanError(
                f"{self.requested.where}: {self.subject}: its layout cannot be computed: {fault}. "
                "Write sizes that divide it."
            )
        if self.lora:
            where = f"{self.requested.where}: {self.subject}"
            model = lora.adapted(self.model, self.lora, self.sizes, where)
            return replace(self, model=model, lora={}).plan(job, rules)
        now = in_force(job, support_of(rules.transformer_engine))
        problems = [*self.illegal, *_illegal_fields(self, coerces=now.coerces)]
        if any(problem.code == "dtype" for problem in problems):
            return None, problems
        without, with_shim, ends = None, None, ""
        if self.requested.trains:
            nothing = InForce(
                "as-configured", False, False, False, False, False, False, now.support
            )
            try:
                without, with_shim = decide(self, nothing), decide(self, now)
                with_shim = _with_scaler(self, with_shim, job)
            except DtypeError as error:
                key = self.key_of(error.key or "dtype")
                return None, [*problems, Problem.of(error, self.subject, key)]
            except SettingsError as error:
                key = self.key.removesuffix(".{}")
                return None, [*problems, Problem.of(error, self.subject, key, "number")]
            problems += problems_of(self, with_shim)
            unpatched = [*self.alone, *problems_of(self, without)]
            ends = next((problem.message for problem in unpatched), "")
        planned = ModelPlan(
            self.subject,
            self.model.parameters,
            self.sizes.to_dict(),
            () if with_shim is None else tuple(_decisions(self, with_shim, job)),
            _stages(self, without),
            _stages(self, with_shim),
            (*self.notes, *_notes(self, with_shim), *filter(None, [self.model.note])),
            self.model.source,
            name_of(self.dtype),
            format=str(self._format or ""),
            warnings=() if with_shim is None else tuple(_warnings(self, with_shim)),
            ends=ends,
        )
        return planned, problems

    def variants(self, job: Job, rules: Rules) -> Sequence[Variant]:
        """See ``Plannable``."""
        if not self.requested.trains:
            return ()
        now = in_force(job, support_of(rules.transformer_engine))
        beta2 = float(self.requested.asked.get(BETA2, optimizer_plan.MEGATRON_BETA2))
        found = []
        for gives_up, fields in cheaper.steps(self.dtype, beta2, now.support):
            other = self.changed(**fields)
            try:
                illegal = problems_of(other, decide(other, now))
            except DtypeError:
                continue
            if not illegal:
                lines = tuple(self._line(*item) for item in fields.items())
                found.append(Variant(gives_up, lines, other))
        return found

    def _line(self, name: str, value: object) -> str:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return f"{self.prefix}{self.key_of(name)}={text}"


@dataclass(frozen=True)
class Side:
    """A model's optimizer and gradient bucket, either with the shim or without.

    Attributes:
        fields: the fields of Megatron's OptimizerConfig.
    """

    now: InForce
    plan: optimizer_plan.OptimizerPlan
    bucket: BucketChoice
    fields: Mapping[str, Any]

    @property
    def fp16(self) -> bool:
        """Whether an fp16 model's config has ``fp16=True``, so that Megatron scales the loss."""
        return bool(self.fields.get("fp16", True))


# -- what is in force ------------------------------------------------------------------------------


def support_of(version: str | None) -> FusedAdamSupport:
    """The capabilities of FusedAdam in a release of TransformerEngine, by default the newest."""
    known = release(version or "")
    # TransformerEngine from about 1.13 has the arguments that Megatron needs. Whether bf16 moments
    # are legal depends on the release (``FusedAdamSupport.bf16_moments``).
    return FusedAdamSupport(known, True, "") if known else legality.NEWEST


def in_force(job: Job, support: FusedAdamSupport) -> InForce:
    """What of the shim is in force in a job."""
    coerces = job.in_force(COERCION, megatron.GROUP)
    return replace(what_is_in_force(job.settings, job.in_force, support), coerces=coerces)


def quantized_in(section: Mapping[str, Any]) -> str:
    """``"fp8"`` or ``"fp4"`` if Megatron stores weights so, by its TransformerConfig."""
    kinds = ("fp8", "fp4")
    return next((one for one in kinds if section.get(one) and section.get(f"{one}_param")), "")


def _dtypes(asked: MegatronModel) -> TrainableDtypes:
    return TrainableDtypes({asked.dtype: max(asked.model.parameters, 1)}, bool(asked.quantized))


def decide(asked: MegatronModel, now: InForce) -> Side:
    """Decide the optimizer's fields and the bucket; dtype names become dtypes in any case.

    ``problems_of`` reports dtype names that neither the framework nor the shim turns into dtypes.

    Raises:
        DtypeError: the user wrote an unknown dtype name or an illegal dtype.
        SettingsError: the user's ``adam_beta2`` is no number.
    """
    model = _dtypes(asked)
    requested = asked.requested
    coerced = replace(now, coerces=True)
    plan = optimizer_plan.plan_optimizer(
        requested, model, coerced, distributed=requested.distributed
    )
    bucket = requested.bucket_in_fp32
    written = bucket is not None or bool(asked.buckets.get(SUMS))
    present = asked.bucket_in_fp32 if bucket is None else bucket
    own = parse_dtype(asked.fsdp or "")
    if asked.fsdp is not None and (own or not now.aligns):
        present = fsdp_in_fp32(present, own, heeded=fsdp_heeds_bucket())
    choice = BucketChoice(present, "set by the user" if own else "as it stands")
    if now.aligns and own is None:
        choice = choose_bucket(
            present=present,
            user_set=written,
            align=now.over_user,
            main_grads=plan.main_grads,
            model=model,
        )
    return Side(now, plan, choice, plan.fields)


def _with_scaler(asked: MegatronModel, side: Side, job: Job) -> Side:
    """Check the numbers that the worker checks, and the offloaded share; add the scaler's fields.

    Raises:
        SettingsError: a value is no number, or the loss scaler begins below its minimum.
    """
    where = asked.requested.where
    plan = scaler.with_scaler(side.plan, asked.requested, side.now, job.settings, asked.dtype)
    if plan.asked.get("optimizer_cpu_offload"):
        legality.check_numbers(plan.asked, ("optimizer_offload_fraction",), where)
    return replace(side, plan=plan, fields=plan.fields)


# -- what is illegal -------------------------------------------------------------------------------


def fields_of(target: str) -> tuple[str, ...]:
    """The fields of one of Megatron's dataclasses; empty if Megatron is not installed."""
    return look(f"{target}.__init__").parameters


def _illegal_fields(asked: MegatronModel, *, coerces: bool) -> Iterator[Problem]:
    """Yield the fields that a config lacks, or whose value the worker refuses when it is made."""
    for written, key, targets in (
        (asked.written, asked.key, (CONFIG,)),
        (asked.buckets, asked.bucket_key.replace(_BUCKET, "{}"), (DDP,)),
        (asked.layers, asked.layers_key, config_dtypes.MODEL),
    ):
        if targets is not config_dtypes.MODEL:  # a framework's models may have further fields
            whose = f"Megatron's {targets[0].rpartition(':')[2]}"
            yield from unknown_keys(written, fields_of(targets[0]), asked.subject, key, whose)
        if coerces:
            refused = config_dtypes.refused(written, targets, key, asked.requested.where)
            yield from (replace(one, subject=asked.subject) for one in refused.problems)
    for name in _DTYPES:
        value = asked.written.get(name, "")
        # ``problems_of`` reports ``main_grads_dtype=None``, unless Megatron ignores the field.
        null = value is None and name == "main_grads_dtype"
        if not isinstance(value, str | torch.dtype) and not null:
            fault = f"{asked.requested.where}: {name}={value!r} is no name of a dtype"
            remedy = "Write a name, such as fp32 or bf16."
            yield Problem("dtype", asked.subject, asked.key_of(name), fault, remedy)
    for kind in ("fp8", "fp4"):
        name = f"{kind}_param"
        if asked.layers.get(name) and not asked.layers.get(kind):
            remedy = f"Write {asked.layers_key.format(kind)} too, or leave it out."
            key = asked.layers_key.format(name)
            fault = f"Megatron refuses it without {kind}"
            yield Problem("fp8-parameters", asked.subject, key, fault, remedy)


def misplaced(
    subject: str, written: Iterable[str], key: str, ddp_key: str, optimizer_key: str
) -> Iterator[Problem]:
    """Yield keys for the layers that set precision in another config, or misspelt dtype fields.

    ``{}`` in the keys of the three sections stands for a field's name. A framework's models may
    have further fields, so other unknown keys are left to the framework.
    """
    known = {name for target in _LAYERS for name in fields_of(target)}
    places = {name: optimizer_key.format(name) for name in fields_of(CONFIG)}
    places |= {name: ddp_key.format(name) for name in fields_of(DDP)}
    ours = {name for name in places if name.endswith("_dtype")} | {
        _BUCKET,
        megatron.PRECISION_AWARE,
    }
    dtypes = config_dtypes.installed_fields()
    lost = [name for name in written if name in ours or get_close_matches(name, dtypes, 1, 0.8)]
    yield from unknown_keys(
        lost, known, subject, key, "Megatron's TransformerConfig", places=places
    )


def problems_of(asked: MegatronModel, side: Side) -> list[Problem]:
    """List what Megatron refuses of an optimizer and its bucket.

    Raises:
        PlanError: the optimizer is not Adam.
    """
    fields, requested = side.fields, asked.requested
    optimizer = str(fields.get("optimizer", requested.optimizer))
    if optimizer != "adam":
        raise PlanError(
            f"{requested.where}: {asked.subject}: optimizer={optimizer!r}: its states are not "
            "known here, and may be larger than adam's. Planned are only jobs with adam."
        )
    aware = bool(fields.get(megatron.PRECISION_AWARE))
    distributed = bool(fields.get("use_distributed_optimizer", requested.distributed))
    found = []
    for name in () if side.now.coerces else _stay_names(asked):
        message = (
            f"{requested.where}: {name}={requested.asked[name]!r} is not turned into a dtype, as "
            f"{COERCION} is not in force for this job"
        )
        remedy = f"Leave it out, or let the shim's {COERCION} act in the job."
        found.append(("dtype", name, message, remedy))
    if aware and not distributed:
        remedy = "Write use_distributed_optimizer: true, or leave it out."
        message = "it needs the distributed optimizer"
        found.append(("precision-aware", megatron.PRECISION_AWARE, message, remedy))
    if not aware and fields.get("main_grads_dtype", asked.dtype) is None:
        remedy = "Write fp32, or leave it out."
        found.append(("dtype", "main_grads_dtype", "None is no dtype", remedy))
    bucket = requested.bucket_in_fp32
    if asked.buckets.get(SUMS) and (asked.bucket_in_fp32 if bucket is None else bucket):
        message = "Megatron takes it only with grad_reduce_in_fp32: false"
        remedy = "Write grad_reduce_in_fp32: false, or leave it out."
        found.append(("bucket", SUMS, message, remedy))
    workers = legality.need_precision_aware(fields) + legality.cannot_train(
        fields,
        _dtypes(asked),
        {torch.float32 if side.bucket.grad_reduce_in_fp32 else asked.dtype},
        distributed=distributed,
        written_back=asked.gathers or not (asked.quantized and needs_gather()),
    )
    every = (*(Problem(code, "", *fault) for code, *fault in found), *workers.problems)
    return [replace(one, subject=asked.subject, key=asked.key_of(one.key)) for one in every]


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


def _precision(asked: MegatronModel, side: Side) -> Precision:
    """The dtypes of the tensors that Megatron makes with the fields and the bucket of ``side``."""
    dtype, fields = asked.dtype, dict(side.fields)
    fields.update(bf16=dtype is torch.bfloat16, fp16=dtype is torch.float16, params_dtype=dtype)
    if (side.now.support.version or ()) < legality.REMAINDERS_SINCE:
        fields["store_param_remainders"] = False
    wanted = reader.read_wanted(fields.get)
    aware = bool(fields.get(megatron.PRECISION_AWARE))
    bucket = torch.float32 if side.bucket.grad_reduce_in_fp32 else dtype
    sums = bool(asked.buckets.get(SUMS)) and not side.bucket.grad_reduce_in_fp32
    master = wanted.masters.get(dtype)
    main = wanted.masters[torch.float16]
    if master is None and aware and reader.adam_keeps_masters(fields.get, main):
        # FusedAdam makes a master weight for an fp32 parameter, too, and never updates this master.
        master = main
    moments = [wanted.exp_avg or torch.float32, wanted.exp_avg_sq or torch.float32]
    offloaded = 0.0
    if fields.get("optimizer_cpu_offload"):
        offloaded = float(fields.get("optimizer_offload_fraction") or 0.0)
        moments = [torch.float32, torch.float32]
    return Precision(
        name_of(dtype),
        name_of(bucket),
        "" if master is None else name_of(master),
        name_of(moments[0]),
        name_of(moments[1]),
        sums=sums,
        copies=not (sums or torch.float32 in (dtype, bucket) or legality.steps_parameters(fields)),
        offloaded=min(max(offloaded, 0.0), 1.0),
        quantized=asked.quantized,
        offload_keeps_master=not aware,
    )


def _stages(asked: MegatronModel, side: Side | None) -> tuple[Stage, ...]:
    """What a GPU holds in each pipeline stage; ``side`` is ``None`` without an optimizer."""
    sizes = asked.sizes
    frozen, value_head = asked.frozen_routers, asked.value_head
    counts = layout.count(asked.model, sizes, frozen_routers=frozen, value_head=value_head)
    if side is None:
        precision = Precision(name_of(asked.dtype), quantized=asked.quantized)
        made, name, distributed = precision, "", True
        counts = [layout.StageCount(frozen=one.dense + one.experts + one.frozen) for one in counts]
    else:
        made = _precision(asked, side)
        name = str(side.fields.get("optimizer", asked.requested.optimizer))
        distributed = side.fields.get("use_distributed_optimizer", asked.requested.distributed)
    stages = []
    for number, count in enumerate(counts):
        dense = Share(count.dense, count.frozen, sizes.shared_by, sizes.tensor)
        shares = {"model": dense}
        if count.experts:
            groups = sizes.experts_tensor * sizes.expert
            experts = Share(count.experts, 0, sizes.experts_shared_by, groups)
            shares = {"dense": dense, "experts": experts}
        parts = (
            part(key, replace(share, states_sharded=bool(distributed)), made, name)
            for key, share in shares.items()
        )
        stages.append(Stage(number, tuple(parts)))
    return tuple(stages)


# -- what is told ----------------------------------------------------------------------------------


def _decisions(asked: MegatronModel, side: Side, job: Job) -> Iterator[Decided]:
    """Yield a trained model's choices."""
    if side.now.dispatches:
        yield Decided(megatron.DISPATCH, side.plan.chosen, side.plan.because)
    if side.now.aligns:
        chosen = describe_bucket(side.bucket.grad_reduce_in_fp32, _dtypes(asked))
        yield Decided(megatron.ALIGNMENT, chosen, side.bucket.because)
    told = scaler.predict_scaler(side.plan, job.settings, asked.dtype)
    if side.now.scales and told is not None:
        yield Decided(megatron.SCALING, *told, asked.unscaled if side.fp16 else "")


def _notes(asked: MegatronModel, side: Side | None) -> Iterator[str]:
    if side is not None:
        yield from filter(None, (*side.plan.warnings, side.bucket.problem))
    if asked.written and not fields_of(CONFIG):
        yield (
            "not checked: whether Megatron's OptimizerConfig has the fields that are written; "
            "megatron-core is not installed here"
        )
    if asked.quantized:
        yield (
            "fp8 weights count 2 bytes, as in bf16: TransformerEngine also keeps each one "
            "transposed (from Blackwell on not with the recipes delayed and tensorwise: 1 byte); "
            "their scales are not counted. Embeddings, norms and the output layer stay "
            f"{name_of(asked.dtype)}"
        )
    elif asked._format and not asked.layers.get("disable_parameter_transpose_cache"):
        times = "and, to train, transposed" if side is not None else "for the forward pass"
        yield (
            "not counted: TransformerEngine keeps each weight that it quantizes in fp8 or fp4, too"
            f", {times}, from the first micro-batch on: in fp8 at most as many bytes as the "
            "16-bit weights, besides scales. With disable_parameter_transpose_cache: true in the "
            "model's config it makes them anew in each micro-batch"
        )
    if asked.buckets.get(SUMS):
        yield f"{asked.key_of(SUMS)}: its fp32 sums are counted for all parameters"
    further = asked.model.number("num_nextn_predict_layers", "mtp_num_hidden_layers")
    if further:
        yield (
            f"not counted: {further} of the layers that predict further tokens, which the "
            "framework may build in the last stage"
        )


def _warnings(asked: MegatronModel, side: Side) -> Iterator[str]:
    """Yield what legal settings lose: a config for another dtype, a moment that cannot decay."""
    fields, flags = side.plan.asked, {"fp16": torch.float16, "bf16": torch.bfloat16}
    flag = next((flag for flag in flags if fields.get(flag)), "")
    own = next((flag for flag, dtype in flags.items() if dtype is asked.dtype), "")
    found = name_of(asked.dtype)
    expected = flag or ("fp32" if own in fields else found)
    if any(problem.code == "flags" for problem in asked.illegal):
        pass  # the problem says it
    elif own == "fp16" and not (side.fp16 or side.fields.get(legality.STATIC)):
        yield scaler.unscaled(asked.requested.where, False, bool(side.fields.get("bf16")))
    elif expected != found:
        yield (
            f"expected {expected}, found {found}: the OptimizerConfig is for another model: set "
            "its bf16, fp16 and params_dtype to what the model is. Leave "
            f"{asked.key_of(flag or own)} out"
        )
    moment, aware = "exp_avg_sq_dtype", side.fields.get(megatron.PRECISION_AWARE)
    why = optimizer_plan.why_no_decay(fields)
    low = aware and read_dtype(side.fields.get(moment)) is torch.bfloat16
    if why and low and moment in {**asked.requested.opt_in, **fields}:
        line = asked._line(BETA2, 0.95)
        yield f"{why}. Write {line}, or fp32 where the command has {moment}=bf16"
