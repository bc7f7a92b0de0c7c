"""The settings of one model of a planned job on Megatron, and the shim's decisions about the model.

A plan calls the same functions as a training process. ``plan_optimizer`` decides the optimizer's
config, and ``deciding.bucket`` decides the gradient bucket. ``reader.read_wanted`` returns the
dtypes of the tensors that Megatron makes from the decided config.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from precision_shim.adapting import Settings
from precision_shim.errors import PlanError
from precision_shim.planning.counting import Precision
from precision_shim.planning.record import Problem
from precision_shim.planning.shapes import Model
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

from ..deciding.requested import (
    COERCION,
    GROUP,
    OVERLAP,
    PRECISION_AWARE,
    InForce,
    RequestedConfig,
    what_is_in_force,
)
from ..deciding.table import PRECISION_AWARE_FIELDS, OptimizerPlan, plan_optimizer
from ..reading import reader
from .sizes import Sizes


@dataclass(frozen=True)
class Asked:
    """One model of a job on Megatron.

    Attributes:
        wishes: the settings in the framework's config.
        model: names and shapes.
        sizes: the sizes of the parallel groups.
        dtype: the parameters' dtype.
        bucket_in_fp32: the framework's own value of ``grad_reduce_in_fp32``.
        frozen: function that returns whether the parameter with a given name is frozen.
        value_head: whether the output layer is a value head with one output.
        key: the config's key of an optimizer field, for messages; ``{}`` stands for the field.
        bucket_key: the config's key of ``grad_reduce_in_fp32``.
        prefix: the prefix of a key that is set on the command line, such as ``"++"``.
        parked: maps a config key to components; if the key is on, the framework moves the
            components to the host while they are unused.
        place: name of a group of GPUs; models with the same ``place`` share these GPUs.
        bucket_keys: the keys of Megatron's DistributedDataParallelConfig that the user wrote.
        illegal: problems that the adapter found.
        notes: remarks about legal settings.
        takes_name: function that returns whether the framework accepts and converts a dtype name;
            ``None`` if the framework passes all dtype names to Megatron.
        keys: maps optimizer fields to config keys that do not follow the pattern ``key``.
        known: the optimizer fields that the framework's config has; ``None`` for all.
        write: function that adds optimizer fields to the job's own command line, and reads the line
            again: it returns the added lines and the model; ``None`` if the framework refuses the
            fields. Without it a line is ``key=value``.
        one_line: whether a line sets a field of all models of the job.
    """

    wishes: RequestedConfig
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
    takes_name: Callable[[str], bool] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    known: Collection[str] | None = None
    write: Callable[[Mapping[str, Any]], tuple[tuple[str, ...], Any] | None] | None = None
    one_line: bool = False

    @property
    def subject(self) -> str:
        """The model's name."""
        return self.wishes.subject

    def key_of(self, name: str) -> str:
        """The config's key of an optimizer field or of ``grad_reduce_in_fp32``."""
        if name == "grad_reduce_in_fp32":
            return self.bucket_key
        return self.keys.get(name) or self.key.format(name)


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


def support_of(version: str | None) -> FusedAdamSupport:
    """The capabilities of FusedAdam in a release of TransformerEngine, by default the newest."""
    if version is None:
        return NEWEST
    known = release(version)
    # TransformerEngine from about 1.13 has the arguments that Megatron needs. Whether bf16 moments
    # are legal depends on the release (``FusedAdamSupport.bf16_moments``).
    return FusedAdamSupport(known, True, "") if known else NEWEST


def without_shim(support: FusedAdamSupport) -> InForce:
    """The ``InForce`` without the shim; ``coerces`` is true, because a plan parses dtype names."""
    return InForce("as-configured", True, False, False, False, False, support)


Holds = Callable[[str, str], bool]
"""Function that returns whether a feature is in force for a group of seams."""


def with_shim(settings: Settings, support: FusedAdamSupport, holds: Holds) -> InForce:
    """The ``InForce`` with the shim; ``coerces`` is true, because a plan parses dtype names.

    ``problems_of`` reports dtype names that neither the framework nor the shim turns into dtypes.
    """
    return replace(what_is_in_force(settings, holds, support), coerces=True)


def side(asked: Asked, now: InForce) -> Side:
    """Decide the optimizer's fields and the bucket.

    Raises:
        DtypeError: the user wrote an unknown dtype name or an illegal dtype.
    """
    model = TrainableDtypes({asked.dtype: max(asked.model.parameters, 1)})
    wishes = asked.wishes
    plan = plan_optimizer(wishes, model, now, distributed=wishes.distributed)
    written = wishes.bucket_in_fp32 is not None
    present = bool(wishes.bucket_in_fp32) if written else asked.bucket_in_fp32
    choice = BucketChoice(present, False, "as it stands")
    if now.aligns:
        choice = choose_bucket(
            present=present,
            user_set=written,
            align=now.over_user,
            main_grads=plan.main_grads,
            model=model,
        )
    return Side(plan, choice)


def precision(asked: Asked, side: Side, support: FusedAdamSupport) -> Precision:
    """The dtypes of the tensors that Megatron makes with the fields and the bucket of ``side``."""
    dtype, fields = asked.dtype, dict(side.fields)
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
        unpacks=_find_unpacked(moments, support) if aware else (),
        offloaded=min(max(offloaded, 0.0), 1.0),
        offload_keeps_master=not aware,
    )


def _find_unpacked(
    moments: Mapping[str, torch.dtype], support: FusedAdamSupport
) -> tuple[str, ...]:
    """List the moments that FusedAdam casts to fp32 for a whole parameter group at once."""
    if set(moments.values()) == {torch.bfloat16}:
        version = support.version
        if version is None or version >= CAPTURABLE_BF16_SINCE:
            return ()
    return tuple(name for name, dtype in moments.items() if dtype is not torch.float32)


def problems_of(
    asked: Asked, side: Side, support: FusedAdamSupport, *, holds: Holds
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
    fields, problems = side.fields, []
    subject = asked.wishes.subject

    def report(code: str, field: str, message: str, remedy: str) -> None:
        problems.append(Problem(code, subject, asked.key_of(field), message, remedy))

    aware = bool(fields.get(PRECISION_AWARE))
    _refuse_others(asked, fields)
    if not holds(COERCION, GROUP):
        problems += _texts(asked)
    if aware and not fields.get("use_distributed_optimizer", asked.wishes.distributed):
        report(
            "precision-aware",
            PRECISION_AWARE,
            "it needs the distributed optimizer",
            "Write use_distributed_optimizer: true, or leave it out.",
        )
    one_chunk = (asked.sizes.virtual or 1) < 2 and not isinstance(asked.sizes.stages, str)
    if fields.get(OVERLAP) and one_chunk:
        report(
            "layers",
            OVERLAP,
            "Megatron ends in an IndexError, because each pipeline stage has one chunk: expected "
            f"{asked.sizes.key('virtual')} of at least 2 chunks",
            "Leave it out, or split the stages into chunks.",
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
            "grad_reduce_in_fp32",
            "fp16 gradients cannot be clipped by the precision-aware optimizer",
            "Write grad_reduce_in_fp32: true, or clip_grad: 0.",
        )
    return problems


def _texts(asked: Asked) -> Iterator[Problem]:
    """Yield a problem for each dtype name that Megatron would receive as a string."""
    # Megatron never reads main_grads_dtype of a precision-aware optimizer.
    takes, aware = asked.takes_name, asked.wishes.precision_aware_by_itself
    first = 2 if takes is None and aware else 1
    for field_ in (*PRECISION_AWARE_FIELDS[first:], "main_params_dtype"):
        value = asked.wishes.asked.get(field_)
        if isinstance(value, str) and not (takes is not None and takes(value)):
            yield Problem(
                "dtype",
                asked.wishes.subject,
                asked.key_of(field_),
                f"{asked.wishes.where}: {field_}={value!r} is not turned into a dtype, as "
                f"{COERCION} is not in force for this job",
                f"Leave it out, or let the shim's {COERCION} act in the job.",
            )


def _refuse_others(asked: Asked, fields: Mapping[str, Any]) -> None:
    name = str(fields.get("optimizer", asked.wishes.optimizer))
    if name != "adam":
        raise PlanError(
            f"{asked.wishes.where}: {asked.subject}: optimizer={name!r}: its states are not known "
            "here; planned are those of adam. Plan the job with adam for an upper bound."
        )
