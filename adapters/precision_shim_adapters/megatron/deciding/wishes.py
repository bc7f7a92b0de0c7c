"""The optimizer settings that a framework and its user choose for Megatron, and the resulting plan.

An adapter reads its framework's config into one record, ``Wishes``. ``plan_wishes`` makes a plan
from a ``Wishes``, the trainable parameters and the features in force. Equal ``Wishes`` give the
same plan in every framework.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from precision_shim.adapting import Settings, current_settings, in_force
from precision_shim.precision.dtypes import coerce_dtypes
from precision_shim.precision.model import TrainableDtypes
from precision_shim_adapters.megatron.deciding.legality import (
    FusedAdamSupport,
    check_dtypes,
    release,
)
from precision_shim_adapters.megatron.deciding.numbers import BETA2, check_numbers
from precision_shim_adapters.megatron.deciding.table import (
    ROWS,
    OptimizerPlan,
    OptimizerRequest,
    plan_optimizer,
)

from ..resuming.checkpoint import STATES

GROUP = "megatron"
"""The group of the backend's main seams, and of the adapters' seams that call the backend."""

DISPATCH, ALIGNMENT, SCALING = "bf16-dispatch", "grad-bucket-alignment", "fp16-scaling"
COERCION, AUDIT = "dtype-coercion", "audit"
BUILDING = (DISPATCH, ALIGNMENT, SCALING, AUDIT)
"""The features of seams that call ``building``; these features depend on the model being built."""

PRECISION_AWARE = "use_precision_aware_optimizer"
OVERLAP = "overlap_param_gather_with_optimizer_step"
FUSED_ADAM_ARGUMENTS = (
    "master_weight_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "use_decoupled_grad",
)


@dataclass(frozen=True)
class Wishes:
    """The settings that a framework and its user choose for one model, as an adapter reads them.

    ``asked`` contains only the fields that the user wrote, without defaults of a config class.

    Attributes:
        where: framework, version and key, for messages, such as
            ``"verl 0.9.1, override_optimizer_config"``.
        subject: the model's name, such as ``"actor"``.
        asked: fields of Megatron's OptimizerConfig that the user wrote; dtypes may be names.
        declared: the dtype that the framework declares for the model; needed only if the trainable
            parameters have several dtypes or are unknown.
        auto: the policy for ``PRECISION_SHIM_OPTIMIZER_STATES=auto``, which is ``"as-configured"``
            if the config has fields for the states' dtypes, else ``"guarded"``.
        native: maps the model's dtype to the fields that the framework sets by itself; ``asked``
            overrides them.
        opt_in: the framework's own fields for low-precision states of a bf16 model, with Megatron's
            names as keys.
        reads_opt_in: whether the framework applies ``opt_in`` itself; if not, the shim applies it.
        blockers: the framework's reasons why a precision-aware optimizer cannot run.
        optimizer: Megatron's name of the optimizer, used if ``asked`` has no ``optimizer``.
        distributed: whether the framework's config turns on the distributed optimizer.
        bucket_in_fp32: ``grad_reduce_in_fp32`` if the user wrote it, else ``None``.
        nan_check_written: whether the user wrote ``check_for_nan_in_grad``.
        scaler: loss scaler settings from the framework's config, with the shim's names as keys.
        scaler_where: the config's key of the loss scaler settings, for messages.
        unchecked: fields that ``optimizer.check`` skips, because the framework's own files set them
            to the same value for every model.
        trains: whether the model has an optimizer.
    """

    where: str = "Megatron"
    subject: str = "direct caller"
    asked: Mapping[str, Any] = field(default_factory=dict)
    declared: torch.dtype | None = None
    auto: str = "as-configured"
    native: Mapping[torch.dtype, Mapping[str, Any]] = field(default_factory=dict)
    opt_in: Mapping[str, Any] = field(default_factory=dict)
    reads_opt_in: bool = True
    blockers: tuple[str, ...] = ()
    optimizer: str = "adam"
    distributed: bool = True
    bucket_in_fp32: bool | None = None
    nan_check_written: bool = False
    scaler: Mapping[str, Any] = field(default_factory=dict)
    scaler_where: str = ""
    unchecked: tuple[str, ...] = ()
    trains: bool = True

    @property
    def precision_aware_by_itself(self) -> bool:
        """Whether the user's config makes the optimizer precision-aware, without the shim."""
        beneath = self.opt_in.get(PRECISION_AWARE) if self.reads_opt_in else False
        return bool(self.asked.get(PRECISION_AWARE, beneath))


@dataclass(frozen=True)
class InForce:
    """The settings and features in this process that a plan depends on.

    Attributes:
        states: ``PRECISION_SHIM_OPTIMIZER_STATES``.
        coerces: whether dtype names become dtypes.
        dispatches: whether the shim sets OptimizerConfig fields by the model's dtype.
        aligns: whether the shim gives the gradient bucket the main grads' dtype.
        over_user: whether the bucket gets the main grads' dtype even if the user wrote another
            dtype (``GRAD_BUCKET=align``).
        whole_masters: whether checkpoints contain whole fp32 masters.
        support: the FusedAdam that Megatron would use.
    """

    states: str = "auto"
    coerces: bool = True
    dispatches: bool = True
    aligns: bool = True
    over_user: bool = False
    whole_masters: bool = True
    support: FusedAdamSupport = field(default_factory=FusedAdamSupport)


@dataclass(frozen=True)
class Planned:
    """A plan, and the OptimizerConfig fields that follow from it.

    Attributes:
        plan: the result of ``plan_optimizer``.
        dtype: the trainable parameters' dtype; if mixed or unknown, the declared dtype.
        asked: the user's fields; if ``dtype-coercion`` is in force, dtype names are now dtypes.
        added: the fields that the framework or the shim adds; ``asked`` overrides them.
    """

    plan: OptimizerPlan
    dtype: torch.dtype | None
    asked: Mapping[str, Any]
    added: Mapping[str, Any]


def in_force_now(framework: str) -> InForce:
    """The settings and features of this process that a framework's plans depend on."""
    return what_is_in_force(current_settings(), partial(in_force, framework))


def what_is_in_force(
    settings: Settings,
    holds: Callable[[str, str], bool],
    support: FusedAdamSupport | None = None,
) -> InForce:
    """The settings and features that a plan depends on.

    Args:
        settings: the shim's settings.
        holds: function that returns whether a feature is in force for a group of seams.
        support: the FusedAdam that Megatron would use; ``None`` to inspect the installed FusedAdam.
    """
    return InForce(
        states=str(settings["optimizer_states"]),
        coerces=COERCION in settings.features,
        dispatches=holds(DISPATCH, GROUP),
        aligns=holds(ALIGNMENT, GROUP),
        over_user=settings["grad_bucket"] == "align",
        whole_masters=holds(DISPATCH, STATES),
        support=fused_adam_support() if support is None else support,
    )


def plan_wishes(
    wishes: Wishes, model: TrainableDtypes, now: InForce, *, distributed: bool = True
) -> Planned:
    """Plan a model's optimizer; a pure function.

    The optimizer reads gradients in the bucket's dtype even if ``main_grads_dtype`` differs, so the
    shim sets ``main_grads_dtype`` to the bucket's dtype.

    Raises:
        DtypeError: the user wrote an unknown dtype name or an illegal dtype.
        SettingsError: the user's ``adam_beta2`` is no number.
    """
    asked = coerce_written(wishes.asked, wishes.where, now)
    check_numbers(asked, (BETA2,), wishes.where)
    if asked.get("fp16") and asked.get("bf16"):
        asked["bf16"] = False  # if fp16 and bf16 are both set, keep only fp16
    dtype = model.single or wishes.declared
    policy = wishes.auto if now.states == "auto" else now.states
    if not now.dispatches:
        policy = "as-configured"  # plan no dtype for main grads, because the shim sets none
    native = dict(wishes.native.get(dtype, {})) if dtype is not None else {}
    if dtype is torch.float16:
        native = {**scaler_row(), **native}
    elif dtype is torch.bfloat16 and policy == "as-configured":
        if wishes.opt_in.get(PRECISION_AWARE) and (wishes.reads_opt_in or now.dispatches):
            native.update(wishes.opt_in)
    elif dtype is torch.bfloat16:
        asked = {**wishes.opt_in, **asked}
    written = wishes.bucket_in_fp32
    kept = written is not None and not (now.over_user and now.aligns)
    blockers = wishes.blockers
    if kept and not written and dtype is torch.float16:
        blockers += ("the user's grad_reduce_in_fp32=False makes the gradients fp16",)
    made = plan_optimizer(
        OptimizerRequest(
            model=model,
            declared=wishes.declared,
            asked=asked,
            policy=policy,
            optimizer=str(asked.get("optimizer", wishes.optimizer)),
            distributed=bool(
                asked.get("use_distributed_optimizer", wishes.distributed and distributed)
            ),
            support=now.support,
            blockers=blockers,
            native=native,
            aligned=not written if kept else now.aligns,
            fp32_bucket_written=bool(kept and written),
            whole_masters=now.whole_masters,
        )
    )
    added = {key: value for key, value in {**native, **made.adds}.items() if key not in asked}
    return Planned(made, dtype, asked, added)


def scaler_row() -> dict[str, Any]:
    """The fields of Megatron's loss scaler that the shim sets for an fp16 model."""
    return {key: ROWS[torch.float16][key] for key in ("initial_loss_scale", "min_loss_scale")}


def coerce_written(
    written: Mapping[str, Any], where: str, now: InForce | None = None
) -> dict[str, Any]:
    """Turn the dtype names among OptimizerConfig fields into dtypes.

    Returns the fields unchanged if ``dtype-coercion`` is not in force.

    Args:
        written: fields of Megatron's OptimizerConfig.
        where: framework and key, for messages.
        now: the features in force; ``None`` to read them from this process's settings.

    Raises:
        DtypeError: a dtype name is unknown, or a dtype is illegal for its field.
    """
    if not (COERCION in current_settings().features if now is None else now.coerces):
        return dict(written)
    dtypes = coerce_dtypes(written, where=where)
    check_dtypes(dtypes, fused_adam_support() if now is None else now.support, where=where)
    return dtypes


def fused_adam_support() -> FusedAdamSupport:
    """Inspect the FusedAdam that Megatron's precision-aware optimizer would use."""
    try:
        # Megatron's OptimizerConfig, too, inspects the FusedAdam of this TransformerEngine module.
        from transformer_engine.pytorch.optimizers import FusedAdam
    except ImportError:
        return FusedAdamSupport()
    from megatron.core.utils import get_te_version

    version = release(str(get_te_version()))
    known = inspect.signature(FusedAdam).parameters
    lacking = [name for name in FUSED_ADAM_ARGUMENTS if name not in known]
    problem = ""
    if lacking:
        problem = f"TransformerEngine's FusedAdam has no argument {', '.join(lacking)}"
    return FusedAdamSupport(version, not lacking, problem)
