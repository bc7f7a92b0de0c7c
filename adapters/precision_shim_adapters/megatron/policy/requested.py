"""What is requested of a model's optimizer, and what of the shim is in force: a plan's two inputs.

Equal ``RequestedConfig`` give the same plan in every framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from precision_shim.adapting import Settings
from precision_shim.precision.effect import Written

from .legality import FusedAdamSupport

GROUP = "megatron"
"""The group of the backend's main seams, and of the adapters' seams that call the backend."""

STATES = "megatron checkpoint states"
KEYS = "megatron checkpoint keys"
"""``STATES`` and ``KEYS`` are two groups, because only the seams of ``KEYS`` differ by version.
Without ``KEYS`` Megatron raises an error if the bucket's dtype changed. Without ``STATES`` Megatron
would load wrong weights."""

DISPATCH, ALIGNMENT, SCALING = "bf16-dispatch", "grad-bucket-alignment", "fp16-scaling"
COERCION, AUDIT = "dtype-coercion", "audit"
APPLYING = ("dtype-coercion", DISPATCH, SCALING)
"""The features of every seam that calls ``apply_plan``."""

BUILDING = (DISPATCH, ALIGNMENT, SCALING, AUDIT)
"""The features of seams that call ``building``; these features depend on the model being built."""

FSDP_GROUP = "megatron-fsdp"
"""A group of its own: a change of Megatron-FSDP's classes costs only the models that it shards."""

MOSTLY: dict[str, Any] = {"group": GROUP, "optional": True}
"""The arguments that most seams on Megatron's functions share."""
ON_SCALING = {"feature": SCALING, **MOSTLY}

PRECISION_AWARE = "use_precision_aware_optimizer"
_OFFLOAD = "optimizer_cpu_offload"
SETS: Mapping[str, str] = {
    "params_dtype": "params",
    "main_params_dtype": "master",
    "main_grads_dtype": "grad_buckets",
    "exp_avg_dtype": "exp_avg",
    "exp_avg_sq_dtype": "exp_avg_sq",
}
"""Maps a dtype field of Megatron's OptimizerConfig to the component of the audit that it sets."""
OVERLAP = "overlap_param_gather_with_optimizer_step"


@dataclass(frozen=True)
class RequestedConfig:
    """The settings that a framework and its user choose for one model, as an adapter reads them.

    ``asked`` contains only the fields that the user wrote, without defaults of a config class.

    Attributes:
        where: framework, version and key, such as ``"verl 0.9.1, override_optimizer_config"``.
        subject: the model's name, such as ``"actor"``.
        asked: fields of Megatron's OptimizerConfig that the user wrote; dtypes may be names.
        declared: the model's dtype for the framework, if its parameters' are several or unknown.
        auto: what ``PRECISION_SHIM_OPTIMIZER_STATES=auto`` means: ``"as-configured"`` if the config
            has fields for the states' dtypes, else ``"guarded"``.
        native: maps the model's dtype to fields that the framework sets; ``asked`` overrides them.
        opt_in: the framework's fields for low-precision bf16 states, by Megatron's names.
        reads_opt_in: whether the framework applies ``opt_in`` itself; if not, the shim applies it.
        blockers: the framework's reasons why a precision-aware optimizer cannot run.
        optimizer: Megatron's name of the optimizer, used if ``asked`` has no ``optimizer``.
        distributed: whether the framework's config turns on the distributed optimizer.
        bucket_in_fp32: ``grad_reduce_in_fp32`` if the user wrote it, else ``None``.
        nan_check_written: whether the user wrote ``check_for_nan_in_grad``.
        scaler: loss scaler settings from the framework's config, with the shim's names as keys.
        scaler_where: the config's key of the loss scaler settings, for messages.
        wrote: further dtype keys that the user wrote: the framework's own.
        unchecked: fields that ``optimizer.check`` skips: the framework's files fix their values.
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
    wrote: tuple[Written, ...] = ()
    unchecked: tuple[str, ...] = ()
    trains: bool = True

    @property
    def precision_aware_by_itself(self) -> bool:
        """Whether the user's config makes the optimizer precision-aware, without the shim."""
        beneath = self.opt_in.get(PRECISION_AWARE) if self.reads_opt_in else False
        return bool(self.asked.get(PRECISION_AWARE, beneath))

    def written(self, key: str = "", bucket: str = "grad_reduce_in_fp32") -> tuple[Written, ...]:
        """The dtypes that the user wrote for a trained model.

        ``key`` is the config's key of an OptimizerConfig field, with ``{}`` for the field, and
        ``bucket`` that of the bucket's dtype.
        """
        key = key or f"{self.where.rpartition(', ')[2]}.{{}}"
        offload = f"{key.format(_OFFLOAD)}=False" if self.asked.get(_OFFLOAD) else ""
        needs = {name: offload for name in SETS if name.startswith("exp_avg")}
        if self.bucket_in_fp32 is not None:
            needs["main_grads_dtype"] = f"{bucket}={not self.bucket_in_fp32}"
        own = (
            Written(key.format(name), self.asked[name], component, needs.get(name, ""))
            for name, component in SETS.items()
            if name in self.asked and name not in self.unchecked
        )
        return (*own, *self.wrote) if self.trains else ()


@dataclass(frozen=True)
class InForce:
    """The settings and features in this process that a plan depends on.

    Attributes:
        states: ``PRECISION_SHIM_OPTIMIZER_STATES``.
        coerces: whether dtype names become dtypes.
        dispatches: whether the shim sets OptimizerConfig fields by the model's dtype.
        aligns: whether the shim gives the gradient bucket the main grads' dtype.
        over_user: whether it does so even if the user wrote another (``GRAD_BUCKET=align``).
        whole_masters: whether checkpoints contain whole fp32 masters.
        scales: whether the shim chooses the settings of the loss scaler.
        support: the FusedAdam that Megatron would use.
    """

    states: str
    coerces: bool = True
    dispatches: bool = True
    aligns: bool = True
    over_user: bool = False
    whole_masters: bool = True
    scales: bool = True
    support: FusedAdamSupport = field(default_factory=FusedAdamSupport)


def what_is_in_force(
    settings: Settings, holds: Callable[[str, str], bool], support: FusedAdamSupport
) -> InForce:
    """The ``InForce``; ``holds``: whether a feature is in force for a group of seams."""
    return InForce(
        states=str(settings["optimizer_states"]),
        coerces=COERCION in settings.features,
        dispatches=holds(DISPATCH, GROUP),
        aligns=holds(ALIGNMENT, GROUP),
        over_user=settings["grad_bucket"] == "align",
        whole_masters=holds(DISPATCH, STATES),
        scales=holds(SCALING, GROUP),
        support=support,
    )
