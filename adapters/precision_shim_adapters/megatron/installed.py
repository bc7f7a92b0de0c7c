"""Inspect the TransformerEngine that is installed in this process."""

from __future__ import annotations

import inspect

from precision_shim.adapting import look
from precision_shim.precision.releases import release

from .policy.legality import GATHER, FusedAdamSupport

FUSED_ADAM_ARGUMENTS = (
    "master_weight_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "use_decoupled_grad",
)
"""The arguments of FusedAdam that Megatron's precision-aware optimizer needs."""


FSDP = "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel"
FSDP_CLASSES = (
    {"target": f"{FSDP}.__init__", "unless": (f"{FSDP}V1",)},
    {"target": f"{FSDP}V1.__init__", "only_if": (f"{FSDP}V1",)},
    {"target": f"{FSDP}V2.__init__", "only_if": (f"{FSDP}V2",)},
)
"""Where a model is wrapped: where there are two classes, ``FSDP`` is a function that picks one."""

FSDP_GRADS = "megatron_fsdp_main_grads_dtype"
"""The DDP's field with the dtype of Megatron-FSDP's buckets, from megatron-core 0.17 on."""


def fsdp_heeds_bucket() -> bool:
    """Whether Megatron-FSDP reads ``grad_reduce_in_fp32``, as it does up to megatron-core 0.18."""
    names = look(f"{FSDP}.__init__").names | look(f"{FSDP}V1.__init__").names
    return FSDP_GRADS not in names or "grad_reduce_in_fp32" in names


def needs_gather() -> bool:
    """Whether Megatron writes masters into fp8 parameters only with ``fp8_param_gather``."""
    owner = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
    return GATHER in look(f"{owner}._copy_main_params_to_model_params").names


def fused_adam_support() -> FusedAdamSupport:
    """Inspect the FusedAdam that Megatron's precision-aware optimizer would use."""
    try:
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
