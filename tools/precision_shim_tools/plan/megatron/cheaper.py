"""List settings that reduce a model's memory on Megatron, and what each setting costs the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from precision_shim.precision.dtypes import name_of
from precision_shim.precision.moments import second_moment_can_decay
from precision_shim_adapters.megatron.policy.legality import REMAINDERS_SINCE, FusedAdamSupport
from precision_shim_adapters.megatron.policy.requested import PRECISION_AWARE

_LOW_GRADIENTS: Mapping[str, Any] = {
    PRECISION_AWARE: True,
    "main_grads_dtype": "model",
    "grad_reduce_in_fp32": False,
}
_ON_HOST: Mapping[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
_STEPS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (
        "nothing: the masters are kept as remainders, and checkpoints have them in fp32",
        {PRECISION_AWARE: True, "store_param_remainders": True},
    ),
    ("precision of the gradients' sum: they are reduced in the model's dtype", _LOW_GRADIENTS),
    ("precision of the first moment", {**_LOW_GRADIENTS, "exp_avg_dtype": "bf16"}),
    (
        "precision of both moments",
        {**_LOW_GRADIENTS, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    ),
    ("speed: the host steps the optimizer, in fp32", _ON_HOST),
    ("speed, and precision of the gradients' sum", {**_LOW_GRADIENTS, **_ON_HOST}),
)
"""Each entry: what the user gives up (the least first), in words, and the settings to write."""


def steps(
    dtype: torch.dtype, beta2: float, support: FusedAdamSupport
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what the user gives up, and the settings to write, for the steps that make sense.

    ``dtype`` is the parameters' dtype, and ``beta2`` the optimizer's ``adam_beta2``.
    """
    for gives_up, step in _STEPS:
        fields = {key: name_of(dtype) if value == "model" else value for key, value in step.items()}
        if fields.get("store_param_remainders") and (support.version or ()) < REMAINDERS_SINCE:
            continue
        low = {"main_grads_dtype", "store_param_remainders"} & fields.keys()
        if low and dtype is not torch.bfloat16:
            continue
        if "exp_avg_sq_dtype" not in fields or second_moment_can_decay(beta2):
            yield gives_up, fields
