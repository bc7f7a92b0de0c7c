"""The dispatch table: the OptimizerConfig fields that the shim sets for each model dtype.

The dispatch table follows verl's pull request 6526. The rule that keeps ``exp_avg_sq`` in fp32 at a
high ``beta2`` is the shim's own (``precision.moments``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from precision_shim.precision.dtypes import name_of, parse_dtype
from precision_shim.precision.model import TrainableDtypes
from precision_shim.precision.moments import second_moment_can_decay

from .legality import (
    BF16,
    BF16_MOMENTS_SINCE,
    CAPTURABLE_BF16_SINCE,
    FP16,
    FP32,
    NEED_PRECISION_AWARE,
    REMAINDERS_SINCE,
    FusedAdamSupport,
)

MEGATRON_BETA2 = 0.999
"""Megatron's default of ``adam_beta2``."""

PRECISION_AWARE_FIELDS = (
    "use_precision_aware_optimizer",
    "main_grads_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)
"""The fields with which a user of verl 0.9 requests low-precision states."""

ROWS: Mapping[torch.dtype, Mapping[str, Any]] = {
    BF16: {
        "bf16": True,
        "fp16": False,
        "params_dtype": BF16,
        "use_precision_aware_optimizer": True,
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
        "use_precision_aware_optimizer": True,
        "store_param_remainders": False,
    },
    FP32: {"bf16": False, "fp16": False, "params_dtype": FP32},
}
"""Maps the model's dtype to the fields that the shim sets. Other fields keep Megatron's default."""


@dataclass(frozen=True)
class OptimizerRequest:
    """All inputs of ``plan_optimizer``.

    Attributes:
        model: the trainable parameters.
        declared: the dtype that the framework declares for the model; used only if the parameters'
            dtypes are mixed or unknown.
        asked: OptimizerConfig fields that the user wrote, with dtypes as ``torch.dtype``.
        policy: one of ``"follow-model"``, ``"as-configured"`` and ``"guarded"`` (follow-model, but
            ``exp_avg_sq`` stays fp32 if rounding to bf16 would stop its decay).
        optimizer: Megatron's optimizer name.
        distributed: whether the distributed optimizer is used.
        support: the installed FusedAdam.
        blockers: the framework's reasons why the precision-aware optimizer cannot run.
        native: fields that the framework sets by itself; the shim and the user override them.
        aligned: whether the gradient bucket will have the dtype of the chosen main grads.
        fp32_bucket_written: whether the bucket stays fp32 because the user's config requires it.
        whole_masters: whether checkpoints will contain whole fp32 masters even if the optimizer
            stores only the masters' lower 16 bits (remainders).
    """

    model: TrainableDtypes
    declared: torch.dtype | None
    asked: Mapping[str, Any]
    policy: str
    optimizer: str = "adam"
    distributed: bool = True
    support: FusedAdamSupport = field(default_factory=FusedAdamSupport)
    blockers: tuple[str, ...] = ()
    native: Mapping[str, Any] = field(default_factory=dict)
    aligned: bool = True
    fp32_bucket_written: bool = False
    whole_masters: bool = True


@dataclass(frozen=True)
class OptimizerPlan:
    """The values chosen for fields of one model's OptimizerConfig.

    Attributes:
        adds: fields that the shim adds; the user's fields override them.
        main_grads: dtype of the main grads, with the user's fields applied.
        chosen: the choice in words.
        because: the reason in words.
        warnings: warnings for the user.
        bucket_warning: a warning about the bucket; the seam on the DDP gives the same warning.
    """

    adds: Mapping[str, Any]
    main_grads: torch.dtype
    chosen: str
    because: str
    warnings: tuple[str, ...] = ()
    bucket_warning: str = ""


def obstacles(request: OptimizerRequest) -> list[str]:
    """Return all reasons why a model's optimizer cannot be precision-aware; empty if it can be.

    The reasons come from the assertions of Megatron's ``OptimizerConfig.__post_init__`` and from
    Megatron's condition on fp8 recipes. Megatron's layer-wise optimizer and Megatron's FSDP cannot
    be precision-aware because they build no FusedAdam.

    With ``optimizer_cpu_offload`` the shim chooses no precision-aware optimizer, because Megatron
    would not resume this optimizer exactly. If the optimizer is not precision-aware, a resume with
    CPU offload fails with a KeyError. If the optimizer is precision-aware, a resume with CPU
    offload succeeds, but step counts or masters differ from the checkpoint's (docs/megatron.md has
    the measurements). The shim corrects step counts and masters, but a later resume without the
    shim would be silently wrong. The audit measured the bytes per bf16 parameter on a fake GPU with
    all states offloaded (DP is the data-parallel size):

    - An optimizer that is not precision-aware has 2 (weight) + 4 (bucket) + 4/DP (master) bytes.
    - A precision-aware optimizer with fp32 main grads has 2 (weight) + 4 (bucket) bytes.
    - A precision-aware optimizer with bf16 main grads has 2 (weight) + 2 (bucket) bytes.

    On the host, each kind of optimizer has 16/DP bytes per parameter. An optimizer that is not
    precision-aware computes the same steps, bit for bit, as a precision-aware optimizer with fp32
    main grads.
    """
    reasons = []
    if request.optimizer != "adam":
        reasons.append(f"optimizer is {request.optimizer!r}, not 'adam'")
    if not request.distributed:
        reasons.append("the distributed optimizer is off")
    if request.asked.get("optimizer_cpu_offload"):
        reasons.append("Megatron does not resume optimizer_cpu_offload exactly with it")
    recipe = request.asked.get("fp8_recipe")
    if recipe not in (None, "delayed"):
        reasons.append(f"fp8_recipe is {recipe!r}, not 'delayed'")
    version = request.support.version
    if request.asked.get("store_param_remainders") and (version or ()) >= REMAINDERS_SINCE:
        # The user's ``store_param_remainders`` stays, so the shim must not add conflicting fields.
        dtype = request.model.single or request.declared
        if dtype is FP16:
            reasons.append("store_param_remainders takes bf16 parameters, they are fp16")
        if request.asked.get("optimizer_cuda_graph"):
            reasons.append("store_param_remainders and optimizer_cuda_graph exclude each other")
    reasons += request.blockers
    if request.support.problem:
        reasons.append(request.support.problem)
    return reasons


def plan_optimizer(request: OptimizerRequest) -> OptimizerPlan:
    """Choose the fields of the OptimizerConfig for one model."""
    asked = request.asked
    dtype = request.model.single
    why: list[str] = []
    warnings: list[str] = []
    if request.model.fp8:
        row: dict[str, Any] = {}
        why.append("fp8 parameters: nothing is added")
    elif dtype is None and request.model.counts:
        row = _flags(request.declared)
        if request.native.get("use_precision_aware_optimizer"):
            row["use_precision_aware_optimizer"] = False
        why.append(f"trainable parameters of several dtypes ({request.model}): fp32 states")
    else:
        dtype = dtype or request.declared
        row = dict(ROWS.get(dtype, {})) if dtype is not None else {}
        if dtype is not None:
            why.append(f"trainable parameters are {name_of(dtype)}")
        if dtype is not None and not row:
            why.append("no rule for that dtype: nothing is added")

    if request.policy == "as-configured":
        row = _flags(dtype if row and dtype is not None else request.declared) if row else {}
        why.append("only what the config asks for")
    elif row.get("use_precision_aware_optimizer"):
        row = _restrict(row, request, why, warnings)

    why += [
        f"{key} is the user's"
        for key in row
        if key in _PRECISION_FIELDS and asked.get(key, row[key]) != row[key]
    ]
    return _conclude(request, row, why, warnings)


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
    row: dict[str, Any], request: OptimizerRequest, why: list[str], warnings: list[str]
) -> dict[str, Any]:
    """Adapt a dispatch table's row to the user's fields, the bucket and the installed FusedAdam."""
    asked = request.asked
    moments = any(key in row for key in _MOMENTS)
    if asked.get("use_precision_aware_optimizer") is False:
        why.append("the user turned the precision-aware optimizer off")
        return _without_precision_aware(row, asked)
    if not request.aligned and "main_grads_dtype" in row:
        row["main_grads_dtype"] = FP32
        if "main_grads_dtype" not in asked:
            why.append(_FP32_BUCKET if request.fp32_bucket_written else _NOT_ALIGNED)
    if not request.whole_masters and "store_param_remainders" not in row:
        row["store_param_remainders"] = False
        why.append("whole fp32 masters: checkpoints could not be read without the shim otherwise")
    blocked = obstacles(request)
    if moments and not blocked and not request.support.bf16_moments:
        since = ".".join(map(str, BF16_MOMENTS_SINCE))
        blocked = [f"{request.support.label} takes no bf16 moments (needs {since})"]
    if blocked:
        if not asked.get("use_precision_aware_optimizer"):
            why.append(f"precision-aware optimizer cannot run: {'; '.join(blocked)}: fp32 states")
        # Keep the user's fields; if Megatron would refuse them, a seam raises an error later.
        return _without_precision_aware(row, asked)
    if "exp_avg_sq_dtype" in row and "exp_avg_sq_dtype" not in asked:
        _guard_second_moment(row, request, why, warnings)
    if asked.get("optimizer_cuda_graph"):
        _restrict_capturable(row, request, why)
    return row


def _guard_second_moment(
    row: dict[str, Any], request: OptimizerRequest, why: list[str], warnings: list[str]
) -> None:
    """Keep exp_avg_sq in fp32, or warn, if a bf16 exp_avg_sq cannot decay with ``beta2``."""
    beta2 = float(request.asked.get("adam_beta2", MEGATRON_BETA2))
    if second_moment_can_decay(beta2):
        return
    reason = (
        f"at adam_beta2={beta2:g} a bf16 exp_avg_sq cannot decay: 1 - beta2 = "
        f"{1 - beta2:.2g} is not above 2^-8"
    )
    if request.policy == "guarded":
        row["exp_avg_sq_dtype"] = FP32
        why.append(f"exp_avg_sq stays fp32: {reason}")
    else:
        warnings.append(
            f"optimizer_states=follow-model makes exp_avg_sq bf16, but {reason}. Set "
            "adam_beta2 to 0.99 or lower, or exp_avg_sq_dtype to fp32, or use "
            "PRECISION_SHIM_OPTIMIZER_STATES=auto."
        )


def _restrict_capturable(row: dict[str, Any], request: OptimizerRequest, why: list[str]) -> None:
    """Change the table's row to values that FusedAdam accepts with ``optimizer_cuda_graph``."""
    moments = [request.asked.get(key, row.get(key, FP32)) for key in _MOMENTS]
    version = request.support.version or ()
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
    if all(_as_dtype(asked.get(key, FP32)) is FP32 for key in NEED_PRECISION_AWARE):
        kept["use_precision_aware_optimizer"] = False
    return kept


def _as_dtype(value: object) -> object:
    """Turn a dtype name into a dtype; with ``dtype-coercion`` off, fields still contain names."""
    return parse_dtype(value) if isinstance(value, str) else value


def _name(value: object) -> object:
    return name_of(value) if isinstance(value, torch.dtype) else value


def _conclude(
    request: OptimizerRequest, row: dict[str, Any], why: list[str], warnings: list[str]
) -> OptimizerPlan:
    result = {**request.native, **row, **request.asked}
    precision_aware = bool(result.get("use_precision_aware_optimizer"))
    main_grads = FP32
    if precision_aware:
        value = _as_dtype(result.get("main_grads_dtype", FP32))
        main_grads = value if isinstance(value, torch.dtype) else FP32
    states = []
    for key, label in (
        ("main_grads_dtype", "main grads"),
        ("exp_avg_dtype", "exp_avg"),
        ("exp_avg_sq_dtype", "exp_avg_sq"),
    ):
        value = _as_dtype(result.get(key, FP32)) if precision_aware else FP32
        if value is not FP32 and key in _MOMENTS and result.get("optimizer_cpu_offload"):
            warnings.append(
                "optimizer_cpu_offload=True brings Megatron's HybridDeviceOptimizer, which keeps "
                f"{label} in fp32 and does not look at {key}={_name(value)}. Leave {key} out, or "
                "optimizer_cpu_offload."
            )
            value = FP32
        states.append(f"{label} {_name(value)}")
    kind = "precision-aware optimizer" if precision_aware else "optimizer not precision-aware"
    bucket_warning = ""
    if precision_aware and _FP32_BUCKET in why:
        bucket_warning = (
            f"the states follow the model, but {_FP32_BUCKET}: 2 bytes per parameter more. "
            "Leave grad_reduce_in_fp32 out, write False, or set PRECISION_SHIM_GRAD_BUCKET=align"
        )
    return OptimizerPlan(
        adds=row,
        main_grads=main_grads,
        chosen=f"{kind}: {', '.join(states)}",
        because="; ".join(why) or "nothing to decide",
        warnings=tuple(warnings),
        bucket_warning=bucket_warning,
    )
