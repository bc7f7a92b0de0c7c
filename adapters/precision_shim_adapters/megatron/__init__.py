"""The backend for every framework on Megatron-core: adapters read configs and call its functions.

What an adapter of a small trainer needs:

1. In its ``Adapter``: ``seams=collect(megatron.SEAMS, ...)``, ``paths={**megatron.PATHS, ...}``,
   ``effects=megatron.EFFECTS``.
2. A function that reads the framework's config into ``Wishes``.
3. Around the function that builds model and optimizer, a seam for ``BUILDING`` in the group
   ``GROUP``: ``with building("mine", read): return call.proceed()``.
4. Where the framework makes Megatron's OptimizerConfig, a seam for ``SETTLING``: make the config
   from the ``fields`` of ``settle(build)``, and pass it to ``keep_layout`` of what ``settle``
   returned.
5. Where the framework makes the optimizer, a seam for ``grad-bucket-alignment``: ``check(...)``.
6. Around the framework's step, a seam for ``fp16-scaling``: ``with skipping(succeeds=...)``; and
   ``metrics(optimizer)`` where the framework reports its metrics.
"""

from __future__ import annotations

from precision_shim.adapting import collect

from ..frameworks import MEGATRON_EFFECTS as EFFECTS
from .acting import ddp, masters, optimizer, overflow, scaled
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

SEAMS = collect(optimizer, ddp, checkpoint, states, masters, offloaded, scaled, overflow, audit)
"""The seams on Megatron's own functions; an adapter passes ``SEAMS`` to ``collect``."""

PATHS = {**checkpoint.PATHS, **ddp.PATHS, **masters.PATHS, **offloaded.PATHS, **audit.PATHS}
"""Maps each group of ``SEAMS`` to its name for users; an adapter adds the adapter's own groups."""

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
