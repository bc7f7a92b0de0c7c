"""Pass ``dtype: float16`` of verl's VeOmni engine to VeOmni as its compute dtype.

Without the shim, verl ignores this key, and VeOmni gathers parameters in bfloat16.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from precision_shim.adapting import Call, holding, seam

from ..config import VEOMNI, is_fp16, of_section
from .engines import IN_FP16, on, scale
from .fsdp import inside


@seam(
    f"{VEOMNI}._build_model_optimizer",
    why="knows the engine's config, and makes module and optimizer",
    relies_on=(
        "build_parallelize_model",
        "engine_config",
        "mixed_precision",
        "module",
        "optimizer",
    ),
    **on(VEOMNI),
)
def build(call: Call) -> Any:
    """Build a model that computes in float16 if ``dtype`` is float16, and scale its loss.

    Raises:
        DtypeError: ``mixed_precision`` is off.
    """
    engine = call.instance
    if not is_fp16(engine.engine_config.dtype):
        return call.proceed()
    of_section(engine.engine_config, "engine_config").check_fp16()
    with holding(IN_FP16, True):
        result = call.proceed()
    engine._autocast_dtype = torch.float16
    parts = inside(engine.optimizer)
    if parts and not hasattr(engine.optimizer, "param_groups"):
        # VeOmni's container (expert parallelism, Muon) lacks param_groups, which a scaler reads.
        engine.optimizer.param_groups = [group for part in parts for group in part.param_groups]
    scale(engine, VEOMNI.because)
    return result


@seam(
    "veomni.distributed.torch_parallelize:build_parallelize_model",
    why="takes the dtype that FSDP gathers parameters in, which verl leaves at its default",
    aliases=("verl.workers.engine.veomni.transformer_impl:build_parallelize_model",),
    **on(VEOMNI),
)
def compute_in_fp16(call: Call, mixed_precision: Any) -> Any:
    """Gather parameters in float16 for a model that ``build`` builds."""
    if IN_FP16.get():
        call.arguments["mixed_precision"] = dataclasses.replace(
            mixed_precision, param_dtype="float16"
        )
    return call.proceed()
