"""The dtypes that each OptimizerConfig field may have with the installed TransformerEngine.

The rules come from ``FusedAdam.__init__`` in each release, and from the choices of Megatron-LM's
``--main-grads-dtype``. A test compares them with the real FusedAdam's constructor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from precision_shim.errors import DtypeError
from precision_shim.precision import releases
from precision_shim.precision.dtypes import name_of

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


_AWARE = "use_precision_aware_optimizer"


def steps_parameters(config: Mapping[str, Any]) -> bool:
    """Whether a precision-aware FusedAdam steps the parameters themselves, and not their masters.

    Megatron's ``use_precision_aware_optimizer_no_fp8_or_ds_fp8``.
    """
    low = config.get("main_params_dtype") not in (None, FP32)
    recipe = low or config.get("fp8_recipe") in (None, "delayed")
    return bool(config.get(_AWARE) and (recipe or config.get("optimizer_cpu_offload")))


GATHERS = (GATHER := "fp8_param_gather", "fp4_param_gather")
"""The fields of Megatron's DDP config that write masters back into quantized parameters."""


def quantized_fault(
    config: Mapping[str, Any], *, written_back: bool
) -> tuple[str, str, str] | None:
    """Return field, problem and remedy if the distributed optimizer cannot train fp8 parameters.

    ``written_back``: whether Megatron writes masters outside FusedAdam back into such parameters.
    """
    if not steps_parameters(config):
        if written_back:
            return None
        problem = f"without {GATHER}, Megatron never writes masters back into fp8 parameters"
        return GATHER, problem, f"Write {GATHER}: true, or leave fp8_param out."
    if config.get("fp8_recipe") != "delayed":
        problem = "Megatron makes no masters for fp8 or fp4 parameters with it"
        return _AWARE, problem, f"Write {_AWARE}: false."
    if config.get("store_param_remainders", True):
        problem = "FusedAdam takes no remainders as masters of fp8 parameters"
        return "store_param_remainders", problem, "Write store_param_remainders: false."
    return None


NEED_PRECISION_AWARE = (
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)
"""Fields for which Megatron accepts only fp32 if the optimizer is not precision-aware."""


def not_precision_aware(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return field, problem and remedy for each field that needs a precision-aware config."""
    if config.get(_AWARE):
        return []
    return [
        (
            field,
            f"{name_of(config[field])} without {_AWARE}: Megatron takes fp32 only",
            f"Write {_AWARE}: true, or leave {field} out.",
        )
        for field in NEED_PRECISION_AWARE
        if isinstance(config.get(field), torch.dtype) and config[field] is not FP32
    ]
