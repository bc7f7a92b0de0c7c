"""Read the booleans of Megatron's configs, which a YAML file or a shell may have made strings.

Frameworks and Megatron ask only whether a value is true, so ``"false"`` would turn a feature on.
"""

from __future__ import annotations

from typing import Any

from precision_shim.errors import DtypeError

SWITCHES = (
    "use_precision_aware_optimizer",
    "use_distributed_optimizer",
    "store_param_remainders",
    "optimizer_cpu_offload",
    "optimizer_cuda_graph",
    "bf16",
    "fp16",
    "grad_reduce_in_fp32",
    "check_for_nan_in_grad",
    "use_megatron_fsdp",
    "fp8_param_gather",
    "fp4_param_gather",
    "fp8_param",
    "fp4_param",
    "fp32_residual_connection",
    "overlap_param_gather_with_optimizer_step",
    "use_layer_wise_param_layout",
)
"""The boolean fields of Megatron's configs that the shim reads."""

_TRUE = ("true", "yes", "on")


def read_switch(value: Any, key: str, where: str) -> Any:
    """Return ``True`` for a string that means true in YAML, and what is no string unchanged.

    Raises:
        DtypeError: another string.
    """
    if not isinstance(value, str):
        return value
    if value.strip().lower() in _TRUE:
        return True
    raise DtypeError(
        f"{where}: {key}={value!r} is a string, of which frameworks and Megatron ask only whether "
        f"it is empty; allowed: true, false. Write {key} without quotes, as true or false.",
        key=key,
    )
