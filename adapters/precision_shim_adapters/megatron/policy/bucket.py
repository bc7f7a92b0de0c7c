"""Choose the gradient bucket's dtype so that it equals the dtype of the optimizer's main grads.

Megatron reads ``main_grads_dtype`` only in an assertion: the main grads always have the bucket's
dtype. A bucket is fp32 (``grad_reduce_in_fp32``) or has its parameters' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from precision_shim.precision.dtypes import name_of
from precision_shim.precision.model import TrainableDtypes

SUMS = "param_name_patterns_for_fp32_local_accumulation"
"""The field of the DDP's config that adds up some gradients in fp32 on each rank, beside a bucket
in which the ranks add up in the parameters' dtype. Megatron asserts that the bucket is not fp32."""


@dataclass(frozen=True)
class BucketChoice:
    """The value chosen for ``grad_reduce_in_fp32``.

    Attributes:
        grad_reduce_in_fp32: the chosen value.
        because: the reason, in words.
        problem: an inconsistency that the shim does not correct, or ``""``.
    """

    grad_reduce_in_fp32: bool
    because: str
    problem: str = ""


def describe_bucket(in_fp32: bool, model: TrainableDtypes) -> str:
    """The decision on the bucket of a model's trainable parameters, in words."""
    dtype = "that of the parameters" if model.single is None else name_of(model.single)
    return f"gradient bucket {'fp32' if in_fp32 else dtype} (grad_reduce_in_fp32={in_fp32})"


def fsdp_in_fp32(present: bool, own: torch.dtype | None, *, heeded: bool) -> bool:
    """Whether Megatron-FSDP reduces 16-bit parameters' gradients in fp32.

    ``present`` is ``grad_reduce_in_fp32``, ``heeded`` whether the installed Megatron-FSDP reads it,
    ``own`` the config's ``megatron_fsdp_main_grads_dtype``.
    """
    return (present and heeded) or own is torch.float32


def choose_bucket(
    *, present: bool, user_set: bool, align: bool, main_grads: torch.dtype, model: TrainableDtypes
) -> BucketChoice:
    """Choose the bucket's dtype for the trainable parameters (``model``) that share the bucket.

    ``present`` is the config's ``grad_reduce_in_fp32``, which ``align`` (``GRAD_BUCKET=align``)
    overrides even if the user wrote it. ``main_grads`` is the dtype of the optimizer's main grads.
    """
    low = main_grads is not torch.float32
    # A model chunk without trainable parameters has no bucket, and so requires no fp32 bucket. The
    # bucket of quantized parameters has their nominal dtype.
    wanted = not (low and model.counts.keys() <= {main_grads})
    because = f"main grads are {name_of(main_grads)}"
    if low and wanted:
        because += f", but the parameters are not all {name_of(main_grads)} ({model})"
    if user_set and not align:
        problem = ""
        if present != wanted:
            problem = (
                f"grad_reduce_in_fp32={present} gives the gradient bucket another dtype than the "
                f"optimizer's main grads: {because}. Write {wanted}, or set "
                "PRECISION_SHIM_GRAD_BUCKET=align"
            )
        return BucketChoice(present, "set by the user", problem)
    return BucketChoice(wanted, because)
