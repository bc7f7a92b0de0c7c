"""What Megatron's configs may contain: dtypes, numbers and booleans, and which of them together.

The rules on dtypes come from ``FusedAdam.__init__`` in each release of TransformerEngine, and from
the choices of Megatron-LM's ``--main-grads-dtype``. A test compares them with the real FusedAdam's
constructor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from precision_shim.errors import DtypeError, SettingsError
from precision_shim.precision import releases
from precision_shim.precision.dtypes import name_of
from precision_shim.precision.findings import Findings, Problem
from precision_shim.precision.model import TrainableDtypes

release = releases.release

FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8

REMAINDERS_SINCE = (2, 1)
"""TransformerEngine release that introduced ``store_param_remainders``."""

CAPTURABLE_BF16_SINCE = (2, 14)
"""First TransformerEngine release whose capturable mode accepts bf16 moments, if both are bf16."""

UNFUSED_PACKED_SINCE = (2, 11)
"""First release whose unfused attention, the only one for fp32, accepts packed sequences."""


@dataclass(frozen=True)
class FusedAdamSupport:
    """The capabilities of the FusedAdam that Megatron will use.

    Attributes:
        version: TransformerEngine's release, such as ``(2, 11)``; ``None`` if not installed.
        precision_aware: whether the constructor has the precision-aware optimizer's arguments.
        problem: why the precision-aware optimizer cannot run, or ``""``.
    """

    version: tuple[int, ...] | None = None
    precision_aware: bool = False
    problem: str = "TransformerEngine is not installed"

    @property
    def bf16_moments(self) -> bool:
        """Whether ``exp_avg`` and ``exp_avg_sq`` may be bf16."""
        return self.version is not None and self.version >= releases.BF16_MOMENTS_SINCE

    @property
    def label(self) -> str:
        """A name for messages, such as ``"TransformerEngine 2.11"``."""
        if self.version is None:
            return "no TransformerEngine (newest known rules)"
        return "TransformerEngine " + ".".join(map(str, self.version))


NEWEST = FusedAdamSupport((2, 20), True, "")
"""Rules of the newest known TransformerEngine, 2.20.2; used if TransformerEngine is missing."""


_ALWAYS = {
    "main_params_dtype": (FP32, FP16),  # no release up to 2.20 accepts bf16 master weights
    "main_grads_dtype": (FP32, BF16),
    "params_dtype": (FP32, BF16, FP16),
}
"""The legal dtypes of the fields whose rules are the same in every release."""


def legal_dtypes(field: str, support: FusedAdamSupport) -> tuple[torch.dtype, ...] | None:
    """The dtypes that a field of OptimizerConfig may have; ``None`` for a field without a rule."""
    known = support if support.version is not None else NEWEST
    if field in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        return (FP32, BF16, FP16, FP8) if known.bf16_moments else (FP32, FP16, FP8)
    return _ALWAYS.get(field)


def check_dtypes(config: Mapping[str, Any], support: FusedAdamSupport, *, where: str = "") -> None:
    """Raise an error if a field has an illegal dtype; ignore values that are not dtypes.

    Raises:
        DtypeError: names the key, the dtype, the allowed dtypes and TransformerEngine's release.
    """
    for field, value in config.items():
        legal = legal_dtypes(field, support) if isinstance(value, torch.dtype) else None
        if legal is None or value in legal:
            continue
        reason = ""
        if field.startswith("exp_avg") and value is BF16:
            since = ".".join(map(str, releases.BF16_MOMENTS_SINCE))
            reason = f" (bf16 moments need TransformerEngine {since} or newer)"
        elif field == "main_params_dtype" and value is BF16:
            reason = " (TransformerEngine's FusedAdam takes no bf16 master weights)"
        raise DtypeError(
            f"{where + ': ' if where else ''}{field}={name_of(value)!r} is not legal with "
            f"{support.label}{reason}; allowed: {', '.join(map(name_of, legal))}. "
            f"Change {field} or leave it out.",
            key=field,
        )


_AWARE, _OFFLOAD = "use_precision_aware_optimizer", "optimizer_cpu_offload"


def steps_parameters(config: Mapping[str, Any]) -> bool:
    """Whether a precision-aware FusedAdam steps the parameters themselves, and not their masters.

    Megatron's ``use_precision_aware_optimizer_no_fp8_or_ds_fp8``.
    """
    low = config.get("main_params_dtype") not in (None, FP32)
    recipe = low or config.get("fp8_recipe") in (None, "delayed")
    return bool(config.get(_AWARE) and (recipe or config.get(_OFFLOAD)))


# -- fields that exclude each other ----------------------------------------------------------------

GATHERS = (GATHER := "fp8_param_gather", "fp4_param_gather")
"""The fields of Megatron's DDP config that write masters back into quantized parameters."""

NEED_PRECISION_AWARE = (
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)
"""Fields for which Megatron accepts only fp32 if the optimizer is not precision-aware."""


_Fault = tuple[str, str, str, str]
"""Code, field, message and remedy of a problem."""


def need_precision_aware(config: Mapping[str, Any]) -> Findings:
    """Find the fields that only a precision-aware optimizer has; a problem's key is the field."""
    dtypes = {} if config.get(_AWARE) else {name: config.get(name) for name in NEED_PRECISION_AWARE}
    return Findings(
        problems=tuple(
            Problem(
                "dtype",
                "",
                name,
                f"{name_of(dtype)} without {_AWARE}: Megatron takes fp32 only",
                f"Write {_AWARE}: true, or leave {name} out.",
            )
            for name, dtype in dtypes.items()
            if isinstance(dtype, torch.dtype) and dtype is not FP32
        )
    )


def cannot_train(
    config: Mapping[str, Any],
    model: TrainableDtypes,
    gradients: Collection[torch.dtype],
    *,
    distributed: bool,
    written_back: bool,
) -> Findings:
    """Find why an optimizer could not train a model; a problem's key is the field.

    ``gradients`` are the dtypes of the buckets. ``written_back``: whether Megatron writes masters
    outside FusedAdam back into quantized parameters.
    """
    found = list(_quantized(config, written_back)) if model.quantized and distributed else []
    if distributed and config.get(_OFFLOAD) and model.single is FP32:
        message = "Megatron offloads no fp32 parameters: can't optimize a non-leaf Tensor"
        found.append(("offload", _OFFLOAD, message, f"Write {_OFFLOAD}: false, or leave it out."))
    if config.get(_AWARE) and config.get("clip_grad", 1.0) and FP16 in gradients:
        # ``clip_grad_by_total_norm_fp32`` fails on them without a message.
        message = f"{_AWARE} cannot clip fp16 gradients, which grad_reduce_in_fp32=False makes"
        remedy = (
            "Write grad_reduce_in_fp32: true, or clip_grad: 0, or set "
            f"PRECISION_SHIM_GRAD_BUCKET=align, or {_AWARE}: false."
        )
        found.append(("fp16-gradients", "grad_reduce_in_fp32", message, remedy))
    return Findings(problems=tuple(Problem(code, "", *fault) for code, *fault in found))


def _quantized(config: Mapping[str, Any], written_back: bool) -> Iterator[_Fault]:
    """Yield why the distributed optimizer cannot train fp8 parameters."""
    code = "fp8-parameters"
    if not steps_parameters(config):
        if not written_back:
            problem = f"without {GATHER}, Megatron never writes masters back into fp8 parameters"
            yield code, GATHER, problem, f"Write {GATHER}: true, or leave fp8_param out."
    elif config.get("fp8_recipe") != "delayed":
        problem = "Megatron makes no masters for fp8 or fp4 parameters with it"
        yield code, _AWARE, problem, f"Write {_AWARE}: false."
    elif config.get("store_param_remainders", True):
        problem = "FusedAdam takes no remainders as masters of fp8 parameters"
        yield code, "store_param_remainders", problem, "Write store_param_remainders: false."


# -- numbers: Megatron takes any value, and fails at a later step ---------------------------------

BETA2 = "adam_beta2"
SCALER = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
STATIC = "loss_scale"
"""Megatron's static loss scale; 0 and null mean a dynamic loss scale."""

_SCALES = ("initial_loss_scale", "min_loss_scale", STATIC)
_FP32 = (2.0**-149, (2 - 2.0**-23) * 2.0**127)
"""The smallest and the largest positive number in fp32, in which a loss scaler stores its scale."""


def refused_numbers(fields: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    """List the fields whose values are not numbers, and the loss scaler's fields that are <= 0.

    If a value is <= 0, Megatron's loss scaler ends the job at an assertion without a message. A
    scale that overflows or underflows in fp32 stays infinite or 0.
    """
    return [
        name
        for name in names
        if name in fields
        and not (fields[name] is None and name == STATIC)
        and (not isinstance(fields[name], Real) or not _fits(name, fields[name]))
    ]


def _fits(name: str, value: Any) -> bool:
    if name in _SCALES:
        return bool(_FP32[0] <= value <= _FP32[1]) or (name == STATIC and value == 0)
    return bool(value > 0) or name not in SCALER


def allowed(name: str) -> str:
    """The values that a field may have, in words."""
    if name == BETA2:
        return "a number from 0 up to, but not including, 1"
    if name == STATIC:
        return "0 for a dynamic loss scale, or a number above 0 and up to 3.4e38"
    bound = " and up to 3.4e38" if name in _SCALES else ""
    return f"a number above 0{bound}" if name in SCALER else "a number"


def check_numbers(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    """Raise if ``refused_numbers`` lists a field; ``where`` names framework, version and key.

    Raises:
        SettingsError: a value is not a number, or is one that the loss scaler cannot use.
    """
    for name in refused_numbers(fields, names):
        raise SettingsError(
            f"{where}: {name}={fields[name]!r} is not allowed; allowed: {allowed(name)}. Write "
            "one, without quotes, or leave it out."
        )


# -- booleans, which a YAML file or a shell may have made strings ---------------------------------


def read_switch(value: Any, key: str, where: str) -> Any:
    """Return ``True`` for a string that means true in YAML, and what is no string unchanged.

    Raises:
        DtypeError: another string.
    """
    if not isinstance(value, str):
        return value
    if value.strip().lower() in ("true", "yes", "on"):
        return True
    raise DtypeError(
        f"{where}: {key}={value!r} is a string, of which frameworks and Megatron ask only whether "
        f"it is empty; allowed: true, false. Write {key} without quotes, as true or false.",
        key=key,
    )
