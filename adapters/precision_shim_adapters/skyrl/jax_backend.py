"""Warn of fp16 on SkyRL's JAX backend, because the shim scales only losses computed in torch.

The JAX backend trains LoRA adapters in the dtype of the checkpoint's own config; SkyRL has no key
for the dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from precision_shim.adapting import Call, current_settings, decide, seam, versioned, warn
from precision_shim.errors import UnsupportedPrecisionError
from precision_shim.precision.dtypes import parse_dtype

from ..fp16 import FEATURE

GROUP = "jax"
"""The group of the seam on the JAX backend."""

_REASON = "its JAX backend has no loss scaler, and the shim scales losses of torch only"


@seam(
    "skyrl.backends.jax:JaxBackendImpl._create_loss_and_grad_fn",
    FEATURE,
    group=GROUP,
    why="the model is there with its dtype; the optimizers come later, one for each adapter",
    delete_when="SkyRL's JAX backend scales its loss, or takes no float16",
    relies_on=("model_config", "get_config"),
    refusal=_REASON,
    optional=True,
)
def refuse_fp16(call: Call) -> Any:
    """Warn (strict: raise) that the JAX backend trains a float16 checkpoint without a scaler.

    Raises:
        UnsupportedPrecisionError: strict mode is on, and the checkpoint is float16.
    """
    dtype = call.instance.model_config.get_config().dtype
    if dtype is None or parse_dtype(str(dtype)) is not torch.float16:
        return call.proceed()
    message = (
        f"{versioned('skyrl')}: the checkpoint's config.json has dtype={dtype}: {_REASON}, so that "
        "small gradients become zero. Write bfloat16 or float32 there, or train on the fsdp or "
        "megatron backend."
    )
    if current_settings().strict:
        raise UnsupportedPrecisionError(message)
    decide("skyrl", "JAX backend", FEATURE, "left as it is", _REASON)
    warn(message)
    return call.proceed()
