"""The backend for every framework on Megatron-core; adapters call its functions.

Write an adapter of a small trainer in these steps:

1. In the ``Adapter``, pass ``seams=collect(megatron.SEAMS, ...)``, ``effects=megatron.EFFECTS`` and
   ``paths={**megatron.PATHS, ...}``.
2. Write a function ``read`` that reads the framework's config into ``RequestedConfig``.
3. Wrap the function that builds model and optimizer in a seam with the feature ``BUILDING`` and the
   group ``GROUP``. The seam's code is ``with building("mine", read): return call.proceed()``.
4. Wrap the function that makes Megatron's OptimizerConfig in a seam with the features ``APPLYING``.
   In the seam call ``plan = apply_plan(build)``, make the config from ``plan.fields``, and call
   ``keep_layout(plan, config)``.
5. Wrap the function that makes the optimizer in a seam with the feature ``grad-bucket-alignment``.
   In the seam call ``check(...)``.
6. Wrap the framework's step in a seam with the feature ``fp16-scaling``; the seam enters
   ``skipping(succeeds=...)``. Add ``metrics(optimizer)`` to the framework's metrics.
"""

from __future__ import annotations

from precision_shim.adapting import collect

from ..frameworks import MEGATRON_EFFECTS as EFFECTS
from ..frameworks import MEGATRON_PATHS as PATHS
from .audit import seams
from .checkpoints import cpu_offload, optimizer_state, parameter_state
from .policy.optimizer_plan import OptimizerPlan
from .policy.requested import (
    ALIGNMENT,
    BUILDING,
    DISPATCH,
    GROUP,
    PRECISION_AWARE,
    SCALING,
    RequestedConfig,
)
from .training import ddp, loss_scaling, masters, optimizer, overflow
from .training.build import Build, building, current_build, expect_reference
from .training.flags import CONFIG_INIT, fill_inline, requested_by_flags, where_present
from .training.masters import reload_masters
from .training.optimizer import apply_plan, apply_to_config, check, keep_layout, with_fields
from .training.overflow import answer_skips, answer_step, dynamic_scalers, metrics, skipping

APPLYING = ("dtype-coercion", DISPATCH, SCALING)
"""The features of every seam that calls ``apply_plan``."""

SEAMS = collect(
    optimizer,
    ddp,
    optimizer_state,
    parameter_state,
    masters,
    cpu_offload,
    loss_scaling,
    overflow,
    seams,
)
"""The seams on Megatron's own functions; an adapter passes ``SEAMS`` to ``collect``."""

__all__ = [
    "ALIGNMENT",
    "APPLYING",
    "BUILDING",
    "CONFIG_INIT",
    "DISPATCH",
    "EFFECTS",
    "GROUP",
    "PATHS",
    "PRECISION_AWARE",
    "SCALING",
    "SEAMS",
    "Build",
    "OptimizerPlan",
    "RequestedConfig",
    "answer_skips",
    "answer_step",
    "apply_plan",
    "apply_to_config",
    "building",
    "check",
    "current_build",
    "dynamic_scalers",
    "expect_reference",
    "fill_inline",
    "keep_layout",
    "metrics",
    "reload_masters",
    "requested_by_flags",
    "skipping",
    "where_present",
    "with_fields",
]
