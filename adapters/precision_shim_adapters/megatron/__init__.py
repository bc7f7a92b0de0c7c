"""The backend for every framework on Megatron-core; adapters call its functions.

Write an adapter of a small trainer in these steps:

1. In the ``Adapter``, pass ``seams=collect(megatron.SEAMS, ...)``, ``effects=megatron.EFFECTS`` and
   ``paths={**megatron.PATHS, ...}``.
2. Write a function ``read`` that reads the framework's config into ``Wishes``.
3. Wrap the function that builds model and optimizer in a seam with the feature ``BUILDING`` and the
   group ``GROUP``. The seam's code is ``with building("mine", read): return call.proceed()``.
4. Wrap the function that makes Megatron's OptimizerConfig in a seam with the features ``SETTLING``.
   In the seam call ``settled = settle(build)``, make the config from ``settled.fields``, and pass
   the config to ``settled.keep_layout``.
5. Wrap the function that makes the optimizer in a seam with the feature ``grad-bucket-alignment``.
   In the seam call ``check(...)``.
6. Wrap the framework's step in a seam with the feature ``fp16-scaling``; the seam enters
   ``skipping(succeeds=...)``. Add ``metrics(optimizer)`` to the framework's metrics.
"""

from __future__ import annotations

from precision_shim.adapting import collect

from ..frameworks import MEGATRON_EFFECTS as EFFECTS
from ..frameworks import MEGATRON_PATHS as PATHS
from .acting import ddp, masters, optimizer, overflow, repeated, scaled
from .acting.build import Build, building, current_build, expect_reference
from .acting.flags import CONFIG_INIT, fill_inline, where_present, wishes_of_flags
from .acting.masters import reload_masters
from .acting.optimizer import Settled, check, settle, settle_made, with_fields
from .acting.overflow import answer_skips, answer_step, dynamic_scalers, metrics, skipping
from .deciding.wishes import ALIGNMENT, BUILDING, DISPATCH, GROUP, PRECISION_AWARE, SCALING, Wishes
from .reading import audit
from .resuming import checkpoint, offloaded, states

SETTLING = ("dtype-coercion", DISPATCH, SCALING)
"""The features of every seam that calls ``settle``."""

SEAMS = collect(
    optimizer, ddp, checkpoint, states, masters, offloaded, scaled, repeated, overflow, audit
)
"""The seams on Megatron's own functions; an adapter passes ``SEAMS`` to ``collect``."""

__all__ = [
    "ALIGNMENT",
    "BUILDING",
    "CONFIG_INIT",
    "DISPATCH",
    "EFFECTS",
    "GROUP",
    "PATHS",
    "PRECISION_AWARE",
    "SCALING",
    "SEAMS",
    "SETTLING",
    "Build",
    "Settled",
    "Wishes",
    "answer_skips",
    "answer_step",
    "building",
    "check",
    "current_build",
    "dynamic_scalers",
    "expect_reference",
    "fill_inline",
    "metrics",
    "reload_masters",
    "settle",
    "settle_made",
    "skipping",
    "where_present",
    "wishes_of_flags",
    "with_fields",
]
