"""Plan a model's OptimizerConfig by the dispatch table: the fields for each model dtype.

The dispatch table follows verl's pull request 6526. The rule that keeps ``exp_avg_sq`` in fp32 at a
high ``beta2`` is the shim's own (``precision.moments``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from precision_shim.precision.dtypes import coerce_dtypes, name_of, read_dtype
from precision_shim.precision.model import TrainableDtypes
from precision_shim.precision.moments import second_moment_can_decay
from precision_shim.precision.releases import BF16_MOMENTS_SINCE

from .legality import (
    BETA2,
    BF16,
    CAPTURABLE_BF16_SINCE,
    FP16,
    FP32,
    NEED_PRECISION_AWARE,
    REMAINDERS_SINCE,
    FusedAdamSupport,
    check_dtypes,
    check_numbers,
)
from .requested import PRECISION_AWARE, InForce, RequestedConfig

MEGATRON_BETA2 = 0.999
"""Megatron's default of ``adam_beta2``."""

PRECISION_AWARE_FIELDS = (PRECISION_AWARE, "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""The fields with which a user of verl 0.9 requests low-precision states."""

ROWS: Mapping[torch.dtype, Mapping[str, Any]] = {
    BF16: {
        "bf16": True,
        "fp16": False,
        "params_dtype": BF16,
        PRECISION_AWARE: True,
        "main_grads_dtype": BF16,
        "exp_avg_dtype": BF16,
        "exp_avg_sq_dtype": BF16,
    },
    FP16: {
        "fp16": True,
        "bf16": False,
        "params_dtype": FP16,
        "initial_loss_scale": 32768,
        "min_loss_scale": 1,
        PRECISION_AWARE: True,
        "store_param_remainders": False,
    },
    FP32: {"bf16": False, "fp16": False, "params_dtype": FP32},
}
"""Maps the model's dtype to the fields that the shim sets. Other fields keep Megatron's default."""


@dataclass(frozen=True)
class OptimizerPlan:
    """The fields that are decided for one model's OptimizerConfig, and why.

    Attributes:
        asked: the user's fields; if ``dtype-coercion`` is in force, dtype names are now dtypes.
        adds: the fields that the framework or the shim adds; ``asked`` overrides them.
        dtype: the trainable parameters' dtype; if mixed or unknown, the declared dtype. ``None``
            also if the shim does not choose fields by the model's dtype.
        main_grads: dtype of the main grads, with the user's fields applied.
        chosen: the choice in words; ``because`` is the reason.
        by_user: whether the optimizer is precision-aware without the shim, too; ``None`` if the
            shim does not choose fields by the model's dtype.
    """

    asked: Mapping[str, Any]
    adds: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    main_grads: torch.dtype = FP32
    chosen: str = ""
    because: str = ""
    warnings: tuple[str, ...] = ()
    by_user: bool | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields for the framework's OptimizerConfig: ``asked`` over ``adds``."""
        return {**self.adds, **self.asked}

    @property
    def added(self) -> dict[str, Any]:
        """The fields of ``adds`` that the user did not write."""
        return {key: value for key, value in self.adds.items() if key not in self.asked}


def obstacles(requested: RequestedConfig, support: FusedAdamSupport) -> list[str]:
    """Return all reasons why a model's optimizer cannot be precision-aware; empty if it can be.

    They are the assertions of Megatron's ``OptimizerConfig.__post_init__`` and Megatron's condition
    on fp8 recipes; the layer-wise optimizer and Megatron's FSDP build no FusedAdam.

    With ``optimizer_cpu_offload``, Megatron would not resume a precision-aware optimizer exactly:
    step counts or masters differ from the checkpoint's (measured in docs/megatron.md). The shim
    corrects both, but a later resume without the shim would be silently wrong.
    """
    reasons = []
    if requested.optimizer != "adam":
        reasons.append(f"optimizer is {requested.optimizer!r}, not 'adam'")
    if not requested.distributed:
        reasons.append("the distributed optimizer is off")
    if requested.asked.get("optimizer_cpu_offload"):
        reasons.append("Megatron does not resume optimizer_cpu_offload exactly with it")
    recipe = requested.asked.get("fp8_recipe")
    if recipe not in (None, "delayed"):
        reasons.append(f"fp8_recipe is {recipe!r}, not 'delayed'")
    has_remainders = (support.version or ()) >= REMAINDERS_SINCE
    if requested.asked.get("store_param_remainders") and has_remainders:
        # The user's ``store_param_remainders`` stays, so the shim must not add conflicting fields.
        if requested.declared is FP16:
            reasons.append("store_param_remainders takes bf16 parameters, they are fp16")
        if requested.asked.get("optimizer_cuda_graph"):
            reasons.append("store_param_remainders and optimizer_cuda_graph exclude each other")
    reasons += requested.blockers
    if support.problem:
        reasons.append(support.problem)
    return reasons


def scaler_row() -> dict[str, Any]:
    """The fields of Megatron's loss scaler that the shim sets for an fp16 model."""
    return {key: ROWS[FP16][key] for key in ("initial_loss_scale", "min_loss_scale")}


def coerce_written(written: Mapping[str, Any], where: str, now: InForce) -> dict[str, Any]:
    """Turn the dtype names among OptimizerConfig fields into dtypes, if dtype-coercion is in force.

    Raises:
        DtypeError: a dtype name is unknown, or a dtype is illegal for its field.
    """
    if not now.coerces:
        return dict(written)
    dtypes = coerce_dtypes(written, where=where)
    check_dtypes(dtypes, now.support, where=where)
    return dtypes


def plan_optimizer(
    requested: RequestedConfig, model: TrainableDtypes, now: InForce, *, distributed: bool = True
) -> OptimizerPlan:
    """Choose the fields of the OptimizerConfig for one model; a pure function.

    The optimizer reads gradients in the bucket's dtype even if ``main_grads_dtype`` differs, so the
    shim sets ``main_grads_dtype`` to the bucket's dtype.

    Raises:
        DtypeError: the user wrote an unknown dtype name or an illegal dtype.
        SettingsError: the user's ``adam_beta2`` is no number.
    """
    asked = coerce_written(requested.asked, requested.where, now)
    check_numbers(asked, (BETA2,), requested.where)
    if asked.get("fp16") and asked.get("bf16"):
        asked["bf16"] = False  # if fp16 and bf16 are both set, keep only fp16
    dtype = model.single or requested.declared
    policy = requested.auto if now.states == "auto" else now.states
    if not now.dispatches:
        policy = "as-configured"  # plan no dtype for main grads, because the shim sets none
    native = dict(requested.native.get(dtype, {})) if dtype is not None else {}
    if dtype is FP16:
        native = {**scaler_row(), **native}
    elif dtype is BF16 and policy == "as-configured":
        if requested.opt_in.get(PRECISION_AWARE) and (requested.reads_opt_in or now.dispatches):
            native.update(requested.opt_in)
    elif dtype is BF16:
        asked = {**requested.opt_in, **asked}
    blockers = requested.blockers
    if dtype is FP16 and requested.bucket_in_fp32 is False and _keeps_bucket(requested, now):
        blockers += ("the user's grad_reduce_in_fp32=False makes the gradients fp16",)
    by_default = requested.distributed and distributed
    resolved = replace(
        requested,
        asked=asked,
        declared=dtype,
        auto=policy,
        blockers=blockers,
        optimizer=str(asked.get("optimizer", requested.optimizer)),
        distributed=bool(asked.get("use_distributed_optimizer", by_default)),
    )
    why: list[str] = []
    warnings: list[str] = []
    row = _choose_row(resolved, model, native, why)
    if policy == "as-configured":
        row = _flags(dtype) if row else {}
        why.append("only what the config asks for")
    elif row.get(PRECISION_AWARE):
        row = _restrict(row, resolved, now, why, warnings)
    why += [
        f"{key} is the user's"
        for key in row
        if key in _PRECISION_FIELDS and asked.get(key, row[key]) != row[key]
    ]
    by_user = requested.precision_aware_by_itself
    plan = OptimizerPlan(asked, {**native, **row}, dtype, by_user=by_user)
    return _conclude(plan, why, warnings)


def _keeps_bucket(requested: RequestedConfig, now: InForce) -> bool:
    return requested.bucket_in_fp32 is not None and not (now.over_user and now.aligns)


def _choose_row(
    requested: RequestedConfig, model: TrainableDtypes, native: Mapping[str, Any], why: list[str]
) -> dict[str, Any]:
    """The dispatch table's row for a model; fp32 states if the parameters have several dtypes."""
    if model.quantized:
        why.append("fp8 or fp4 parameters: nothing is added")
        return {}
    if model.single is None and model.counts:
        why.append(
            f"trainable parameters of several dtypes ({model}): fp32 states for all, because "
            "FusedAdam has one dtype for each moment of all parameters; 16-bit states for all: "
            f"write {PRECISION_AWARE} and {', '.join(_MOMENTS)}"
        )
        off = {PRECISION_AWARE: False} if native.get(PRECISION_AWARE) else {}
        return {**_flags(requested.declared), **off}
    dtype = requested.declared
    if dtype is None:
        return {}
    why.append(f"trainable parameters are {name_of(dtype)}")
    if dtype not in ROWS:
        why.append("no rule for that dtype: nothing is added")
    return dict(ROWS.get(dtype, {}))


_NOT_ALIGNED = "main grads stay fp32: the gradient bucket is not aligned with them"
_FP32_BUCKET = (
    "main grads stay fp32: grad_reduce_in_fp32=True is the user's, and the optimizer reads the "
    "gradients of the bucket as they are"
)

_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")

_PRECISION_FIELDS = frozenset({*PRECISION_AWARE_FIELDS, "store_param_remainders", "params_dtype"})


def _flags(dtype: torch.dtype | None) -> dict[str, Any]:
    if dtype is None or dtype not in ROWS:
        return {}
    return {key: ROWS[dtype][key] for key in ("bf16", "fp16", "params_dtype")}


def _restrict(
    row: dict[str, Any],
    requested: RequestedConfig,
    now: InForce,
    why: list[str],
    warnings: list[str],
) -> dict[str, Any]:
    """Adapt a dispatch table's row to the user's fields, the bucket and the installed FusedAdam."""
    asked, kept = requested.asked, _keeps_bucket(requested, now)
    aligned = not requested.bucket_in_fp32 if kept else now.aligns
    moments = any(key in row for key in _MOMENTS)
    if asked.get(PRECISION_AWARE) is False:
        why.append("the user turned the precision-aware optimizer off")
        return _without_precision_aware(row, asked)
    if not aligned and "main_grads_dtype" in row:
        row["main_grads_dtype"] = FP32
        if "main_grads_dtype" not in asked:
            why.append(_FP32_BUCKET if kept else _NOT_ALIGNED)
    if not now.whole_masters and "store_param_remainders" not in row:
        row["store_param_remainders"] = False
        why.append("whole fp32 masters: checkpoints could not be read without the shim otherwise")
    blocked = obstacles(requested, now.support)
    if moments and not blocked and not now.support.bf16_moments:
        since = ".".join(map(str, BF16_MOMENTS_SINCE))
        blocked = [f"{now.support.label} takes no bf16 moments (needs {since})"]
    if blocked:
        if not asked.get(PRECISION_AWARE):
            why.append(f"precision-aware optimizer cannot run: {'; '.join(blocked)}: fp32 states")
        # Keep the user's fields; if Megatron would refuse them, a seam raises an error later.
        return _without_precision_aware(row, asked)
    if "exp_avg_sq_dtype" in row and "exp_avg_sq_dtype" not in asked:
        _guard_second_moment(row, requested, why, warnings)
    if asked.get("optimizer_cuda_graph"):
        _restrict_capturable(row, requested, now.support, why)
    return row


def why_no_decay(asked: Mapping[str, Any]) -> str:
    """Why a bf16 exp_avg_sq cannot decay with the user's ``adam_beta2``; empty if it can."""
    beta2 = float(asked.get("adam_beta2", MEGATRON_BETA2))
    if second_moment_can_decay(beta2):
        return ""
    return (
        f"at adam_beta2={beta2:g} a bf16 exp_avg_sq cannot decay: 1 - beta2 = "
        f"{1 - beta2:.2g} is not above 2^-8"
    )


def _guard_second_moment(
    row: dict[str, Any], requested: RequestedConfig, why: list[str], warnings: list[str]
) -> None:
    """Keep exp_avg_sq in fp32, or warn, if a bf16 exp_avg_sq cannot decay with ``beta2``."""
    reason = why_no_decay(requested.asked)
    if not reason:
        return
    if requested.auto == "guarded":
        row["exp_avg_sq_dtype"] = FP32
        why.append(f"exp_avg_sq stays fp32: {reason}")
    else:
        warnings.append(
            f"optimizer_states=follow-model makes exp_avg_sq bf16, but {reason}. Set "
            "adam_beta2 to 0.99 or lower, or exp_avg_sq_dtype to fp32, or use "
            "PRECISION_SHIM_OPTIMIZER_STATES=auto."
        )


def _restrict_capturable(
    row: dict[str, Any], requested: RequestedConfig, support: FusedAdamSupport, why: list[str]
) -> None:
    """Change the table's row to values that FusedAdam accepts with ``optimizer_cuda_graph``."""
    moments = [requested.asked.get(key, row.get(key, FP32)) for key in _MOMENTS]
    version = support.version or ()
    if moments != [BF16, BF16] or version < CAPTURABLE_BF16_SINCE:
        for key in _MOMENTS:
            if key in row:
                row[key] = FP32
        why.append(
            "moments stay fp32: optimizer_cuda_graph takes bf16 moments only both and from "
            f"TransformerEngine {'.'.join(map(str, CAPTURABLE_BF16_SINCE))}"
        )
    row["store_param_remainders"] = False
    why.append("no parameter remainders under optimizer_cuda_graph")


def _without_precision_aware(row: dict[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in row.items() if key not in PRECISION_AWARE_FIELDS}
    kept.pop("store_param_remainders", None)
    # Write ``use_precision_aware_optimizer=False``, because verl writes True for any fp16 model.
    # If the user's dtypes need the precision-aware optimizer, do not turn it off.
    if all(read_dtype(asked.get(key, FP32)) is FP32 for key in NEED_PRECISION_AWARE):
        kept[PRECISION_AWARE] = False
    return kept


def _name(value: object) -> object:
    return name_of(value) if isinstance(value, torch.dtype) else value


def _conclude(plan: OptimizerPlan, why: list[str], warnings: list[str]) -> OptimizerPlan:
    result = plan.fields
    precision_aware = bool(result.get(PRECISION_AWARE))
    main_grads, states = FP32, []
    for key in PRECISION_AWARE_FIELDS[1:]:
        # With dtype-coercion off, fields still contain names.
        value = read_dtype(result.get(key, FP32)) if precision_aware else FP32
        label = key.removesuffix("_dtype").replace("main_grads", "main grads")
        if label == "main grads" and isinstance(value, torch.dtype):
            main_grads = value
        if key in _MOMENTS and result.get("optimizer_cpu_offload"):
            value = FP32  # Megatron's HybridDeviceOptimizer does not look at the fields
        states.append(f"{label} {_name(value)}")
    kind = "precision-aware optimizer" if precision_aware else "optimizer not precision-aware"
    if precision_aware and _FP32_BUCKET in why:
        warnings.append(
            f"the states follow the model, but {_FP32_BUCKET}: 2 bytes per parameter more. "
            "Leave grad_reduce_in_fp32 out, write False, or set PRECISION_SHIM_GRAD_BUCKET=align."
        )
    return replace(
        plan,
        main_grads=main_grads,
        chosen=f"{kind}: {', '.join(states)}",
        because="; ".join(why) or "nothing to decide",
        warnings=tuple(warnings),
    )
