"""The backend for every framework on Megatron-core; adapters call its functions.

The first use of a name imports the backend, and torch with it; ``policy.limits`` needs neither.

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

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        # ``from . import backend`` would ask this function for ``backend``.
        return getattr(import_module(".backend", __name__), name)
